"""Grids and their layouts: read back by our importers and by the packages that own the formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.checkpoint.dequantize import dequantize
from octavo.checkpoint.quantized import import_quantized
from octavo.checkpoint.safetensors import read_safetensors
from octavo.checkpoint.writer import write_safetensors
from octavo.compress import layouts
from octavo.compress.fit import affine
from octavo.compress.grids import (
    Grid,
    ScaleType,
    float8,
    largest_group,
    quantize,
    rounded,
    to_e4m3,
)
from octavo.errors import UsageError

X = (np.random.default_rng(2).standard_normal((64, 256)) * 0.1).astype(np.float32)
GPTQ = {"quant_method": "gptq", "checkpoint_format": "gptq"}
CT = {"quant_method": "compressed-tensors"}


def read_back(tensors: layouts.Tensors, config: dict[str, Any], folder: Path) -> np.ndarray:
    path = folder / "x.safetensors"
    write_safetensors(path, {f"m.{name}": t for name, t in tensors.items()})
    (tensor,) = import_quantized(read_safetensors(path), {"quantization_config": config}).values()
    assert tensor.order is None
    return dequantize(tensor)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [0, 32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_what_is_written_is_read(bits: int, group: int, symmetric: bool, tmp_path: Path) -> None:
    q = quantize(X, Grid(bits, group, symmetric))
    expected = q.values()
    of = {"bits": bits, "group_size": group or -1}
    assert (read_back(layouts.gptq(q), GPTQ | of, tmp_path) == expected).all()
    weights = {"num_bits": bits, "group_size": group or None, "type": "int", "symmetric": symmetric}
    config = CT | {"config_groups": {"g": {"weights": weights, "targets": ["Linear"]}}}
    assert (read_back(layouts.pack_quantized(q), config, tmp_path) == expected).all()
    if bits == 4:
        awq = {"quant_method": "awq", "bits": 4, "group_size": group or 256, "version": "gemm"}
        assert (read_back(layouts.awq(q), awq, tmp_path) == expected).all()
    if bits == 8:
        assert (read_back(layouts.int_quantized(q), config, tmp_path) == expected).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_compressed_tensors_reads_it(bits: int, symmetric: bool) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    q = quantize(X, Grid(bits, 64, symmetric, "f32"))
    args = QuantizationArgs(
        num_bits=bits, type="int", strategy="group", group_size=64, symmetric=symmetric
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")
    state = {n: torch.from_numpy(t.data().copy()) for n, t in layouts.pack_quantized(q).items()}
    codec = BaseCompressor.get_value_from_registry("pack-quantized")
    found = codec.decompress(state, scheme)["weight"]
    assert torch.equal(found.float(), torch.from_numpy(q.values()))


def test_awq_as_its_converter_reads_it() -> None:
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

    q = quantize(X, Grid(4, 64, False))
    parts = {n: torch.from_numpy(t.data().copy()) for n, t in layouts.awq(q).items()}
    codes, scale, zero = AutoAWQConverter(group_size=64)._convert_gemm_module(
        parts["qweight"], parts["scales"], parts["qzeros"]
    )
    found = (codes.float() - zero.float().repeat_interleave(64, 1)) * scale.float().repeat_interleave(64, 1)  # fmt: skip
    assert torch.equal(found, torch.from_numpy(q.values()))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_mlx_reads_it(bits: int, tmp_path: Path) -> None:
    import mlx.core as mx

    grid = Grid(bits, 64, False, "f32")
    found = affine(X.reshape(-1, 64), np.ones((X.size // 64, 64), np.float32), grid.top)
    tensors = layouts.mlx(found, X.shape, grid)
    scaled = found.scale[:, None] * found.codes.astype(np.float32)
    expected = (scaled + found.minimum[:, None]).reshape(X.shape)
    w, scales, biases = (mx.array(tensors[n].data()) for n in ("weight", "scales", "biases"))
    theirs = np.array(mx.dequantize(w, scales, biases, group_size=64, bits=bits))
    assert np.abs(theirs - expected).max() <= np.abs(X).max() * 2**-22  # theirs may fuse
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {f"m.{n}": t for n, t in tensors.items()})
    config = {"quantization": {"group_size": 64, "bits": bits}}
    (tensor,) = import_quantized(read_safetensors(path), config).values()
    assert (dequantize(tensor) == expected).all()


def test_float8_as_torch_rounds_it(tmp_path: Path) -> None:
    x = np.concatenate([X, X[:, :100] * 30], axis=1)
    q = float8(x)
    exact = torch.from_numpy((x / q.scales).copy()).to(torch.float8_e4m3fn)
    assert (exact.view(torch.uint8).numpy() == q.codes).all()
    config = {"quant_method": "fp8"}
    assert (read_back(layouts.float_quantized(q), config, tmp_path) == q.values()).all()


def test_e4m3_halfway_and_beyond() -> None:
    x = np.array(
        [0, -0.0, 448, 500, -1e9, 2**-9, 2**-10, 3 * 2**-10, 17, 18, 19, 1.0625], np.float32
    )
    clipped = torch.from_numpy(np.clip(x, -448, 448)).to(torch.float8_e4m3fn).view(torch.uint8)
    assert (to_e4m3(x) == clipped.numpy()).all()


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32"])
def test_scales_are_what_files_hold(kind: ScaleType) -> None:
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[kind]
    x = torch.from_numpy(X)
    assert torch.equal(torch.from_numpy(rounded(X, kind)), x.to(dtype).float())
    q = quantize(X, Grid(4, 64, True, kind))
    assert (rounded(q.scales, kind) == q.scales).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 32), st.sampled_from([2, 3, 4]), st.booleans())
def test_no_worse_than_absmax(seed: int, bits: int, symmetric: bool) -> None:
    """Than the scales that most tools take, absmax / (2^(b-1) - 1/2) and (max - min) / (2^b - 1)."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((4, 64)) * rng.uniform(0.01, 3)).astype(np.float32)
    q = quantize(x, Grid(bits, 32, symmetric, "f32"))
    groups = x.reshape(-1, 32)
    if symmetric:
        scale = np.abs(groups).max(1, keepdims=True) / (q.grid.middle - 0.5)
        zero = np.full_like(scale, q.grid.middle)
    else:
        low, high = np.minimum(groups.min(1), 0), np.maximum(groups.max(1), 0)
        scale = ((high - low) / q.grid.top)[:, None]
        zero = np.clip(np.rint(-low[:, None] / scale), 1, q.grid.top)
    usual = (np.clip(np.rint(groups / scale) + zero, 0, q.grid.top) - zero) * scale
    assert ((x - q.values()) ** 2).sum() <= ((groups - usual) ** 2).sum() * 1.0001


def test_importance_counts() -> None:
    """Errors move from columns that matter to those that do not."""
    importance = np.where(np.arange(256) % 8 == 0, 100, 1).astype(np.float32)
    plain, weighted = quantize(X, Grid(3)), quantize(X, Grid(3), importance)
    lost = [(importance * (X - q.values()) ** 2).sum() for q in (plain, weighted)]
    assert lost[1] < 0.8 * lost[0]


def test_odd_values_and_refusals() -> None:
    zeros = np.zeros((32, 64), np.float32)
    for symmetric in (True, False):
        assert not quantize(zeros, Grid(4, 64, symmetric)).values().any()
    assert not float8(zeros).values().any()
    with pytest.raises(UsageError, match="1 of the weights are not finite"):
        quantize(np.where(np.arange(64) == 3, np.inf, zeros).astype(np.float32)[:1], Grid())
    with pytest.raises(UsageError, match="96 columns are not whole groups of 64"):
        quantize(np.zeros((1, 96), np.float32), Grid())
    with pytest.raises(UsageError, match="5 bits in groups of 64"):
        Grid(5)
    with pytest.raises(UsageError, match="AWQ holds 4 bits"):
        layouts.awq(quantize(X, Grid(8)))
    assert [largest_group(n, 128) for n in (1024, 576, 96, 48)] == [128, 64, 32, 0]
