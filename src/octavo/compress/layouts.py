"""Quantized matrices as the tensors that formats store, by the names that their readers look for.

Each function gives the tensors of one module, named without the module; `checkpoint/quantized/` has
the reader of each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo import __version__
from octavo.checkpoint.base import TensorType
from octavo.checkpoint.writer import NewTensor
from octavo.compress.fit import F32, Affine
from octavo.compress.grids import Float8, Grid, Quantized, Scheme, rounded
from octavo.errors import UsageError

U8 = npt.NDArray[np.uint8]
Words = npt.NDArray[np.int32]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which output each nibble of a word belongs to
Tensors = dict[str, NewTensor]
# GPTQModel, by which transformers reads GPTQ, refuses grids with zeros that it has not made itself,
# by 0.9.0 or later: before, zeros of 0 were stored wrong. There are none here.
QUANTIZERS = [f"octavo:{__version__}", "gptqmodel:0.9.0"]
KV_SCHEMES = {  # scales are found as keys and values come: files hold none
    "int8": {
        "num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True,
    },
}  # fmt: skip


def pack(codes: npt.NDArray[np.integer], bits: int) -> Words:
    """`[rows, n]` codes as 32-bit words, each row a stream of `bits` bits a code, lowest first."""
    rows, n = codes.shape
    small = np.zeros((rows, -(-n * bits // 32) * 32 // bits if 32 % bits == 0 else n), np.uint8)
    small[:, :n] = codes
    if 32 % bits == 0:
        cells = small.reshape(rows, -1, 8 // bits)
        packed = cells[:, :, 0].copy()
        for i in range(1, 8 // bits):
            packed |= cells[:, :, i] << np.uint8(bits * i)
        return packed.view(np.int32)
    each = np.unpackbits(small[:, :, None], axis=2, bitorder="little")
    padded = np.zeros((rows, -(-n * bits // 32) * 32), np.uint8)
    padded[:, : n * bits] = each[:, :, :bits].reshape(rows, n * bits)
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def _floats(x: F32, grid: Grid) -> NewTensor:
    if grid.scales == "f16":
        return NewTensor.of(np.ascontiguousarray(x.astype(np.float16)), TensorType.F16)
    if grid.scales == "bf16":
        bits = np.ascontiguousarray(x).view(np.uint32) >> 16
        return NewTensor.of(bits.astype(np.uint16), TensorType.BF16)
    return NewTensor.of(np.ascontiguousarray(x), TensorType.F32)


def _words(words: Words) -> NewTensor:
    return NewTensor.of(np.ascontiguousarray(words), TensorType.I32)


def gptq(q: Quantized) -> Tensors:
    """GPTQ, version 1. Raises UsageError where outputs are no whole words."""
    rows, columns = q.codes.shape
    bits = q.grid.bits
    if rows * bits % 32 or columns * bits % 32:
        raise UsageError(f"{rows} x {columns} codes of {bits} bits are not whole words")
    groups = np.arange(columns) // q.width
    return {
        "qweight": _words(pack(q.codes, bits).T),
        "qzeros": _words(pack((q.zeros.T - 1) & q.grid.top, bits)),
        "scales": _floats(q.scales.T, q.grid),
        "g_idx": NewTensor.of(groups.astype(np.int32), TensorType.I32),
    }


def awq(q: Quantized) -> Tensors:
    """AWQ, version gemm. Raises UsageError for what it cannot hold."""
    rows, columns = q.codes.shape
    if q.grid.bits != 4 or rows % 8:
        raise UsageError(
            f"AWQ holds 4 bits and whole words of 8 outputs, not {q.grid.bits}, {rows}"
        )

    def words(codes: npt.NDArray[np.integer]) -> NewTensor:
        nibbles = codes.T.reshape(codes.shape[1], rows // 8, 8)[:, :, AWQ_ORDER]
        return _words(pack(nibbles.reshape(codes.shape[1], rows), 4))

    return {
        "qweight": words(q.codes),
        "qzeros": words(q.zeros),
        "scales": _floats(q.scales.T, q.grid),
    }


def pack_quantized(q: Quantized) -> Tensors:
    """compressed-tensors, pack-quantized."""
    rows, columns = q.codes.shape
    out = {
        "weight_packed": _words(pack(q.codes, q.grid.bits)),
        "weight_scale": _floats(q.scales, q.grid),
        "weight_shape": NewTensor.of(np.array([rows, columns], np.int64), TensorType.I64),
    }
    if not q.grid.symmetric:
        out["weight_zero_point"] = _words(pack(q.zeros.T, q.grid.bits).T)
    return out


def int_quantized(q: Quantized) -> Tensors:
    """compressed-tensors, int-quantized: signed bytes. Raises UsageError for other bits."""
    if q.grid.bits != 8:
        raise UsageError(f"int-quantized holds 8 bits, not {q.grid.bits}")
    codes = (q.codes ^ np.uint8(128)).view(np.int8)
    out = {"weight": NewTensor.of(codes, TensorType.I8), "weight_scale": _floats(q.scales, q.grid)}
    if not q.grid.symmetric:
        zeros = (q.zeros - 128).astype(np.int8)
        out["weight_zero_point"] = NewTensor.of(zeros, TensorType.I8)
    return out


def float_quantized(q: Float8) -> Tensors:
    """compressed-tensors, float-quantized; with other names of scales also what vLLM calls fp8."""
    return {
        "weight": NewTensor.of(q.codes, TensorType.FP8_E4M3),
        "weight_scale": NewTensor.of(q.scales, TensorType.F32),
    }


def mlx(grids: Affine, shape: tuple[int, int], grid: Grid) -> Tensors:
    """MLX, affine: scale * code + bias, the groups of a matrix row by row."""
    rows, columns = shape
    per_row = columns // (grid.group or columns)
    words = pack(grids.codes.reshape(rows, columns), grid.bits).view(np.uint32)
    return {
        "weight": NewTensor.of(words, TensorType.U32),
        "scales": _floats(grids.scale.reshape(rows, per_row), grid),
        "biases": _floats(grids.minimum.reshape(rows, per_row), grid),
    }


def mlx_of(q: Quantized) -> Tensors:
    """MLX of a matrix whose groups have whole zeros: biases are rounded as files hold them."""
    biases = rounded(-q.scales * q.zeros, q.grid.scales)
    grids = Affine(q.scales.reshape(-1), biases.reshape(-1), q.codes.astype(np.int32))
    return mlx(grids, (q.codes.shape[0], q.codes.shape[1]), q.grid)


def integers(
    layout: str, q: Quantized, *, int8: bool = False, step: float | None = None
) -> Tensors:
    """A quantized matrix as a layout stores it. int8: for layers that multiply int8 with int8;
    step: of their inputs, None where each token has its own."""
    if layout == "compressed-tensors":
        out = int_quantized(q) if int8 else pack_quantized(q)
        if step is not None:
            out["input_scale"] = _floats(np.array([step], np.float32), q.grid)
        return out
    if layout == "mlx":
        return mlx_of(q)
    return gptq(q) if layout == "gptq" else awq(q)


def config(
    layout: str, schemes: Mapping[str, Scheme], kept: list[str],
    activations: Mapping[str, str] = MappingProxyType({}), kv: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What config.json says of a folder. schemes: by module; kept: modules left as they were;
    activations: of modules whose inputs are rounded; kv: what keys and values are cached as. Raises
    UsageError for what it cannot say."""
    if layout == "compressed-tensors":
        return {"quantization_config": _compressed(schemes, kept, activations, kv)}
    main = Counter(schemes.values()).most_common(1)[0][0]
    others = {name: s for name, s in schemes.items() if s != main}
    assert isinstance(main, Grid)
    grids = {name: s for name, s in others.items() if isinstance(s, Grid)}
    if layout == "mlx":
        each = {n: {"group_size": g.group, "bits": g.bits} for n, g in grids.items()}
        return {"quantization": {"group_size": main.group, "bits": main.bits} | each}
    if layout == "gptq":
        dynamic: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in kept} | {
            f"+:^{re.escape(n)}$": {"bits": g.bits, "group_size": g.group, "sym": g.symmetric}
            for n, g in grids.items()
        }
        own: dict[str, Any] = {
            "quant_method": "gptq", "bits": main.bits, "group_size": main.group or -1,
            "sym": main.symmetric, "desc_act": False, "checkpoint_format": "gptq",
            "dynamic": dynamic, "meta": {"quantizer": QUANTIZERS},
        }  # fmt: skip
    else:
        if len(sizes := sorted({g.group for g in (main, *grids.values())})) > 1:
            raise UsageError(
                "an AWQ folder has groups of one size; here they are of "
                f"{' and '.join(map(str, sizes))} columns",
                "--format gptq",
            )
        own = {
            "quant_method": "awq", "bits": main.bits, "group_size": main.group, "zero_point": True,
            "version": "gemm", "modules_to_not_convert": kept,
        }  # fmt: skip
    return {"quantization_config": own}


def _compressed(
    schemes: Mapping[str, Scheme], kept: list[str], activations: Mapping[str, str], kv: str | None
) -> dict[str, Any]:
    alike: dict[tuple[Scheme, str | None], list[str]] = {}
    for name, scheme in schemes.items():
        alike.setdefault((scheme, activations.get(name)), []).append(name)
    ordered = sorted(alike.items(), key=lambda item: -len(item[1]))
    groups = {
        f"group_{i}": _scheme(scheme, names if i else ["Linear"], inputs)
        for i, ((scheme, inputs), names) in enumerate(ordered)
    }
    formats = {g["format"] for g in groups.values()} or {"dense"}
    return {
        "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups, "ignore": kept,
        "kv_cache_scheme": None if kv is None else KV_SCHEMES[kv],
    }  # fmt: skip


def _scheme(scheme: Scheme, targets: list[str], activations: str | None) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False,
    }  # fmt: skip
    format = "float-quantized"
    if scheme != "fp8":
        weights |= {"num_bits": scheme.bits, "type": "int", "symmetric": scheme.symmetric}
        if scheme.group:
            weights |= {"strategy": "group", "group_size": scheme.group}
        format = "pack-quantized" if activations is None else "int-quantized"
    inputs: dict[str, Any] | None = None
    if activations is not None:
        each = {"strategy": "token", "dynamic": True}
        inputs = weights | (each if activations == "dynamic" else {"strategy": "tensor"})
        inputs["symmetric"] = True
    return {
        "targets": targets, "weights": weights, "input_activations": inputs,
        "output_activations": None, "format": format,
    }  # fmt: skip
