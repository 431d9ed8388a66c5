"""Folders in every quantized format, written by the packages that own the formats or by their layout.

Each writer takes `weights` `{module: [out, in]}` and gives the tensors of a file, the configuration
that goes with them, and what every module's weight is when dequantized by the format's own code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]


@dataclass
class Written:
    tensors: Tensors
    config: dict[str, Any]
    dequantized: Tensors  # in the type in which the format's own code computes


Writer = Callable[[Tensors], Written]


# -- GPTQ -------------------------------------------------------------------------------------


def _pack_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """`[n, columns]` -> `[n * bits / 32, columns]` int32: a stream of bits down each column."""
    n, columns = codes.shape
    each = np.unpackbits(codes.astype(np.uint8)[:, :, None], axis=2, bitorder="little")[:, :, :bits]
    stream = each.transpose(1, 0, 2).reshape(columns, n * bits)
    return np.packbits(stream, axis=1, bitorder="little").view(np.int32).T.copy()


def gptq(
    bits: int = 4, group: int = 64, sym: bool = False, act_order: bool = False, version: int = 1
) -> Writer:
    """As AutoGPTQ and GPTQModel store it; dequantized by the statement of their documentation,
    scales[g_idx] * (q - z), in fp16."""

    def write(weights: Tensors) -> Written:
        rng = np.random.default_rng(5)
        tensors, expected = {}, {}
        for name, w in weights.items():
            rows, cols = w.shape
            size = cols if group == -1 else group
            index = np.arange(cols) // size
            if act_order:
                index = rng.permutation(index)
            groups, top = -(-cols // size), (1 << bits) - 1
            wt = w.float().T.numpy()
            each = [wt[index == g] for g in range(groups)]
            low, high = (np.stack([f(e, 0) for e in each]) for f in (np.min, np.max))
            middle = 1 << (bits - 1)
            span = np.maximum(-low, high) / (middle - 0.5) if sym else (high - low) / (top - 0.5)
            scales = torch.from_numpy(np.maximum(span, 1e-4)).half()
            fitted = np.clip(np.rint(-low / scales.float().numpy()), 1, top).astype(np.int64)
            zeros = np.full_like(fitted, middle) if sym else fitted
            codes = np.rint(wt / scales.float().numpy()[index] + zeros[index])
            codes = np.clip(codes, 0, top).astype(np.uint8)
            stored = zeros - 1 if version == 1 else zeros
            tensors[f"{name}.qweight"] = torch.from_numpy(_pack_rows(codes, bits))
            tensors[f"{name}.qzeros"] = torch.from_numpy(
                _pack_rows(stored.T.astype(np.uint8), bits).T.copy()
            )
            tensors[f"{name}.scales"] = scales
            tensors[f"{name}.g_idx"] = torch.from_numpy(index.astype(np.int32))
            offset = torch.from_numpy(codes.astype(np.int32) - zeros[index].astype(np.int32))
            expected[name] = (scales[torch.from_numpy(index)] * offset).T
        config = {
            "quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": act_order,
            "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        }  # fmt: skip
        return Written(tensors, {"quantization_config": config}, expected)

    return write


# -- AWQ --------------------------------------------------------------------------------------


def awq(group: int = 64) -> Writer:
    """Packed by its layout; dequantized by compressed-tensors' own converter of AWQ files."""

    def write(weights: Tensors) -> Written:
        from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

        order = [0, 2, 4, 6, 1, 3, 5, 7]
        shifts = torch.arange(0, 32, 4)

        def pack(codes: torch.Tensor) -> torch.Tensor:
            nibbles = codes.long().unflatten(1, (-1, 8))[:, :, order]
            return (nibbles << shifts).sum(-1).to(torch.int64).to(torch.int32)

        tensors: Tensors = {}
        expected: Tensors = {}
        converter = AutoAWQConverter(group_size=group)
        for name, w in weights.items():
            each = w.float().T.unflatten(0, (-1, group))
            low, high = each.amin(1), each.amax(1)
            scales = ((high - low) / 15).clamp(min=1e-4).half()
            zeros = (-low / scales.float()).round().clamp(0, 15).int()
            codes = w.float().T / scales.float().repeat_interleave(group, 0)
            codes = (codes + zeros.repeat_interleave(group, 0)).round().clamp(0, 15).int()
            parts = {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales}
            tensors |= {f"{name}.{k}": v.contiguous() for k, v in parts.items()}
            q, scale, zero = converter._convert_gemm_module(
                parts["qweight"], scales, parts["qzeros"]
            )
            each = q.half() - zero.half().repeat_interleave(group, 1)
            expected[name] = each * scale.repeat_interleave(group, 1)
        config = {
            "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
        }  # fmt: skip
        return Written(tensors, {"quantization_config": config}, expected)

    return write


# -- compressed-tensors -----------------------------------------------------------------------


def compressed(
    bits: int = 4, kind: str = "int", strategy: str = "group", group: int | None = 64,
    symmetric: bool = True, format: str = "pack-quantized", dtype: torch.dtype = torch.bfloat16,
) -> Writer:  # fmt: skip
    """Compressed and decompressed by the package."""

    def write(weights: Tensors) -> Written:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        block = [128, 128] if strategy == "block" else None
        args = QuantizationArgs(
            num_bits=bits, type=kind, strategy=strategy, group_size=group, symmetric=symmetric,
            block_structure=block,
        )  # fmt: skip
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=format)
        codec = BaseCompressor.get_value_from_registry(format)
        tensors, expected = {}, {}
        for name, full in weights.items():
            w = full.to(dtype)
            low, high = _extremes(w, strategy, group)
            scale, zero = calculate_qparams(low, high, args)
            state = {"weight": w, "weight_scale": scale.to(dtype), "weight_zero_point": zero}
            packed = codec.compress(state, scheme)
            expected[name] = codec.decompress(packed, scheme)["weight"]
            tensors |= {f"{name}.{k}": v.contiguous() for k, v in packed.items()}
        weights_config = {
            "num_bits": bits, "type": kind, "strategy": strategy, "group_size": group,
            "symmetric": symmetric, "block_structure": block,
        }  # fmt: skip
        groups = {"group_0": {"targets": ["Linear"], "weights": weights_config, "format": format}}
        config = {
            "quant_method": "compressed-tensors", "format": format, "config_groups": groups,
            "ignore": ["lm_head"], "quantization_status": "compressed",
        }  # fmt: skip
        return Written(tensors, {"quantization_config": config}, expected)

    return write


def _extremes(
    w: torch.Tensor, strategy: str, group: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if strategy == "tensor":
        return w.min().reshape(1), w.max().reshape(1)
    if strategy == "channel":
        return w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    if strategy == "group":
        each = w.unflatten(1, (-1, group))
        return each.amin(2), each.amax(2)
    high, wide = -(-w.shape[0] // 128), -(-w.shape[1] // 128)
    padded = torch.zeros(high * 128, wide * 128, dtype=w.dtype)
    padded[: w.shape[0], : w.shape[1]] = w
    blocks = padded.reshape(high, 128, wide, 128)
    return blocks.amin((1, 3)), blocks.amax((1, 3))


# -- FP8 --------------------------------------------------------------------------------------


def fp8(scales: str) -> Writer:
    """e4m3 with a scale for the tensor, each row, or blocks of 128 x 128 (DeepSeek's layout)."""

    def write(weights: Tensors) -> Written:
        tensors, expected = {}, {}
        for name, full in weights.items():
            w = full.float()
            low, high = _extremes(w, {"row": "channel"}.get(scales, scales), None)
            scale = torch.maximum(low.abs(), high.abs()) / 448
            spread = scale
            if scales == "block":
                spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
                spread = spread[: w.shape[0], : w.shape[1]]
            q = (w / spread).to(torch.float8_e4m3fn)
            tensors[f"{name}.weight"] = q
            ending = "weight_scale_inv" if scales == "block" else "weight_scale"
            tensors[f"{name}.{ending}"] = scale[0] if scales == "tensor" else scale
            expected[name] = q.float() * spread
        config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
        if scales == "block":
            config["weight_block_size"] = [128, 128]
        return Written(tensors, {"quantization_config": config}, expected)

    return write


# -- bitsandbytes -----------------------------------------------------------------------------


def bitsandbytes4(kind: str, nested: bool, dtype: torch.dtype = torch.bfloat16) -> Writer:
    """Quantized and dequantized by the package."""

    def write(weights: Tensors) -> Written:
        import bitsandbytes.functional as bnb

        tensors, expected = {}, {}
        for name, w in weights.items():
            packed, state = bnb.quantize_4bit(
                w.to(dtype), blocksize=64, quant_type=kind, compress_statistics=nested
            )
            tensors[f"{name}.weight"] = packed
            tensors |= {f"{name}.weight.{k}": v for k, v in state.as_dict(packed=True).items()}
            expected[name] = bnb.dequantize_4bit(packed, state)
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
        return Written(tensors, {"quantization_config": config}, expected)

    return write


def bitsandbytes8(weights: Tensors) -> Written:
    import bitsandbytes.functional as bnb

    tensors, expected = {}, {}
    for name, w in weights.items():
        q, scale, _ = bnb.int8_vectorwise_quant(w.half())
        tensors |= {f"{name}.weight": q, f"{name}.SCB": scale}
        expected[name] = bnb.int8_vectorwise_dequant(q, scale).half()
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return Written(tensors, {"quantization_config": config}, expected)


# -- MLX --------------------------------------------------------------------------------------


def mlx(bits: int, group: int, dtype: str = "float32") -> Writer:
    """Quantized and, from scales and biases widened to fp32, dequantized by the package."""

    def write(weights: Tensors) -> Written:
        import mlx.core as mx

        def to_torch(x: mx.array) -> torch.Tensor:
            return torch.from_numpy(np.array(x.astype(mx.float32)))

        tensors, expected = {}, {}
        for name, w in weights.items():
            x = mx.array(w.float().numpy()).astype(getattr(mx, dtype))
            q, scales, biases = mx.quantize(x, group_size=group, bits=bits)
            wide = scales.astype(mx.float32), biases.astype(mx.float32)
            expected[name] = to_torch(mx.dequantize(q, *wide, group_size=group, bits=bits))
            tensors[f"{name}.weight"] = torch.from_numpy(np.array(q))
            for part, x in (("scales", scales), ("biases", biases)):
                tensors[f"{name}.{part}"] = to_torch(x).to(getattr(torch, dtype))
        return Written(tensors, {"quantization": {"group_size": group, "bits": bits}}, expected)

    return write


WRITERS: dict[str, Writer] = {
    "gptq-4": gptq(),
    "gptq-4-sym-128": gptq(group=128, sym=True),
    "gptq-4-row-v2": gptq(group=-1, version=2),
    "gptq-4-act-order": gptq(act_order=True),
    "gptq-8-act-order-sym": gptq(bits=8, sym=True, act_order=True),
    "gptq-2": gptq(bits=2),
    "gptq-3": gptq(bits=3),
    "gptq-8": gptq(bits=8, group=32),
    "awq": awq(),
    "awq-128": awq(group=128),
    "ct-pack-4": compressed(),
    "ct-pack-4-asym": compressed(symmetric=False, group=128),
    "ct-pack-4-asym-f32": compressed(symmetric=False, group=128, dtype=torch.float32),
    "ct-pack-4-row": compressed(strategy="channel", group=None),
    "ct-pack-8": compressed(bits=8, group=32),
    "ct-pack-3": compressed(bits=3),
    "ct-pack-6-asym": compressed(bits=6, symmetric=False),
    "ct-int8": compressed(bits=8, strategy="channel", group=None, format="int-quantized"),
    "ct-int8-asym": compressed(
        bits=8, strategy="channel", group=None, symmetric=False, format="int-quantized"
    ),
    "ct-fp8-row": compressed(
        bits=8, kind="float", strategy="channel", group=None, format="float-quantized"
    ),
    "ct-fp8-tensor": compressed(
        bits=8, kind="float", strategy="tensor", group=None, format="float-quantized"
    ),
    "ct-fp8-block": compressed(
        bits=8, kind="float", strategy="block", group=None, format="float-quantized"
    ),
    "ct-mxfp4": compressed(
        kind="float", group=32, format="mxfp4-pack-quantized", dtype=torch.float32
    ),
    "fp8-tensor": fp8("tensor"),
    "fp8-row": fp8("row"),
    "fp8-block": fp8("block"),
    "nf4": bitsandbytes4("nf4", False),
    "nf4-nested": bitsandbytes4("nf4", True),
    "fp4": bitsandbytes4("fp4", False, torch.float16),
    "bnb-int8": bitsandbytes8,
    "mlx-4": mlx(4, 64),
    "mlx-4-bf16": mlx(4, 64, "bfloat16"),
    "mlx-8": mlx(8, 128),
    "mlx-2": mlx(2, 64),
    "mlx-3": mlx(3, 64),
    "mlx-5": mlx(5, 64),
    "mlx-6": mlx(6, 32),
}


def quantize_folder(folder: Any, writer: Writer, modules: Callable[[str], bool]) -> Tensors:
    """Rewrites the matrices of a saved Hugging Face folder for which `modules` holds; gives what
    they are when dequantized."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    chosen = {
        name.removesuffix(".weight"): w
        for name, w in tensors.items()
        if w.ndim == 2 and name.endswith(".weight") and modules(name)
    }
    written = writer(chosen)
    rest = {n: t for n, t in tensors.items() if n.removesuffix(".weight") not in chosen}
    save_file(rest | written.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | written.config))
    return written.dequantized
