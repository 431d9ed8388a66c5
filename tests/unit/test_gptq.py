"""GPTQ against its definition, column by column, and against rounding to the nearest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.checkpoint.dequantize import dequantize
from octavo.checkpoint.quantized import import_quantized
from octavo.checkpoint.safetensors import read_safetensors
from octavo.checkpoint.writer import write_safetensors
from octavo.compress import layouts
from octavo.compress.gptq import Outputs, gptq
from octavo.compress.grids import Grid, codes_on, quantize

RNG = np.random.default_rng(4)
COLUMNS = 320  # blocks that are not whole


def layer(rows: int = 64, columns: int = COLUMNS) -> tuple[np.ndarray, np.ndarray]:
    """Weights, and H of correlated inputs of very different sizes."""
    inputs = RNG.standard_normal((4 * columns, columns // 4)) @ RNG.standard_normal(
        (columns // 4, columns)
    )
    inputs += RNG.standard_normal(inputs.shape)
    inputs *= np.exp(RNG.standard_normal(columns))
    x = (RNG.standard_normal((rows, columns)) * 0.05).astype(np.float32)
    return x, inputs.T @ inputs / len(inputs)


def by_definition(x: np.ndarray, hessian: np.ndarray, grid: Grid, order: np.ndarray) -> np.ndarray:
    """Optimal brain quantization in a fixed order, with the inverse of what is left made anew."""
    static = quantize(x, grid, np.diag(hessian).astype(np.float32))
    h = hessian + 0.01 * np.diag(hessian).mean() * np.eye(len(hessian))
    rest, codes, left = x.astype(np.float64).copy(), np.zeros(x.shape, np.uint8), list(order)
    while left:
        inverse = np.linalg.inv(h[np.ix_(left, left)])
        i, group = left[0], left[0] // static.width
        scale, zero = static.scales[:, group], static.zeros[:, group]
        column = rest[:, i : i + 1].astype(np.float32)
        codes[:, i] = codes_on(column, scale, zero, grid)[:, 0]
        error = rest[:, i] - scale.astype(np.float64) * (codes[:, i].astype(np.int32) - zero)
        rest[:, left] -= np.outer(error / inverse[0, 0], inverse[0])
        left.pop(0)
    return codes


@pytest.mark.parametrize("symmetric", [True, False])
def test_equal_to_its_definition(symmetric: bool) -> None:
    """The same codes but where a rounding error decides a tie: one in ten thousand at most."""
    x, h = layer()
    grid = Grid(4, 64, symmetric)
    found = gptq(x, h, grid)
    assert found.damping == 0.01
    order = np.argsort(-np.diag(h).astype(np.float32), kind="stable")
    expected = by_definition(x, h, grid, order)
    assert np.mean(found.weights.codes != expected) <= 1e-4


@pytest.mark.parametrize("bits", [3, 4])
def test_less_is_lost(bits: int, tmp_path: Path) -> None:
    """A third of rounding's error is gone at least; files give back the same weights."""
    x, h = layer()
    found = gptq(x, h, Grid(bits, 64))
    values = found.weights.values()
    assert found.error == Outputs(x, h).error(values) and found.error <= 0.67 * found.plain_error
    path = tmp_path / "x.safetensors"
    tensors = layouts.gptq(found.weights)
    write_safetensors(path, {f"m.{n}": t for n, t in tensors.items()})
    config = {"quant_method": "gptq", "bits": bits, "group_size": 64, "checkpoint_format": "gptq"}
    (tensor,) = import_quantized(read_safetensors(path), {"quantization_config": config}).values()
    assert tensor.order is None and (dequantize(tensor) == values).all()


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, h = layer()
    codes = []
    for block in (1, 96, 1024):
        monkeypatch.setattr("octavo.compress.gptq.UPDATE_COLUMNS", block)
        codes.append(gptq(x, h, Grid(4, 64)).weights.codes)
    assert np.mean(codes[0] != codes[1]) <= 1e-4 and np.mean(codes[0] != codes[2]) <= 1e-4


def test_inputs_that_say_little() -> None:
    """Inputs that are always zero, fewer inputs than columns, none at all, and no numbers."""
    x, h = layer()
    dead = h.copy()
    dead[:, ::5] = dead[::5] = 0
    found = gptq(x, dead, Grid())
    assert found.damping == 0.01 and found.error < found.plain_error
    one = RNG.standard_normal(COLUMNS)
    single = gptq(x, np.outer(one, one), Grid())
    assert single.error <= single.plain_error
    for hopeless in (np.zeros_like(h), np.full_like(h, np.nan), -h):
        left = gptq(x, hopeless, Grid())
        assert left.damping is None and np.isfinite(left.weights.values()).all()
    crooked = h - 2 * np.abs(np.linalg.eigvalsh(h)).min() * np.eye(COLUMNS)  # just not positive
    assert gptq(x, crooked, Grid(), damping=1e-12).error <= gptq(x, crooked, Grid()).plain_error
