"""Every stored format: bit for bit what the package that owns it reads, and packed kernels on that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.backends.torch.reference import Reference
from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.base import GROUPED
from octavo.checkpoint.dequantize import dequantize
from octavo.checkpoint.quantized import import_quantized
from octavo.models import build_program
from tests.conftest import Runner
from tests.parity.test_cpu import Divergence
from tests.quantized_models import WRITERS, Tensors, quantize_folder
from tests.small_models import Small, save_hf

LAST_PLACE = {"bnb-int8", "mlx-8", "mlx-6"}  # two roundings there, one here


def linears(name: str) -> bool:
    return "proj" in name


def save(tensors: Tensors, folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("format", WRITERS)
def test_dequantized_bits(format: str, tmp_path: Path) -> None:
    """Rounded to the type in which the owner computes, every weight has the same bits."""
    from octavo.checkpoint.safetensors import read_safetensors

    generator = torch.Generator().manual_seed(1)
    shapes = {"a.q_proj": (96, 256), "a.down_proj": (224, 384)}
    if format.startswith("ct-fp8-block"):
        shapes["a.down_proj"] = (256, 384)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()
    }
    written = WRITERS[format](weights)
    save(written.tensors, tmp_path)
    got = import_quantized(read_safetensors(tmp_path / "model.safetensors"), written.config)
    assert got.keys() == {f"{name}.weight" for name in shapes}
    for name, expected in written.dequantized.items():
        tensor = got[f"{name}.weight"]
        assert tensor.type in GROUPED
        ours = torch.from_numpy(dequantize(tensor)).to(expected.dtype)
        if tensor.order:  # as stored; back to the order of the inputs
            ours = torch.empty_like(ours).index_copy(1, torch.tensor(tensor.order), ours)
        if format in LAST_PLACE:
            step = torch.finfo(expected.dtype).eps * expected.abs().max()
            assert (ours - expected).abs().max() <= step
        else:
            assert torch.equal(ours, expected)
        part = dequantize(tensor.rows(16, 50))
        assert np.array_equal(part, dequantize(tensor)[16:50])


@pytest.mark.parametrize("format", WRITERS)
def test_small_models(format: str, tmp_path: Path) -> None:
    """A folder in the format against transformers with its dequantized weights, then the kernels."""
    small = Small(heads=4, kv_heads=2, head_dim=32, hidden=128, ffn=256)
    oracle = save_hf(small, tmp_path)
    weights = quantize_folder(tmp_path, WRITERS[format], linears)
    with torch.no_grad():
        for name, w in weights.items():
            oracle.get_parameter(f"{name}.weight").copy_(w)
    program = build_program(open_checkpoint(tmp_path))
    rng = np.random.default_rng(1)
    reference, runner, d = Reference(program), Runner(tmp_path), Divergence()
    for _ in range(3):
        ids = rng.integers(3, small.vocabulary, 500).tolist()
        expected = reference.logits(ids)
        with torch.inference_mode():
            # its weights are rounded to its own type, ours are not
            assert (oracle(torch.tensor([ids])).logits[0] - expected).abs().max() <= 0.15
        d.add(expected, runner.logits(ids), ids)
    d.check()
