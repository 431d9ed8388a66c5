"""Scales and codes of rounded layers moved to where less is lost, and scales that are learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.backends.torch.reference import Reference
from octavo.checkpoint.dequantize import dequantize
from octavo.checkpoint.open import open_checkpoint
from octavo.compress.gptq import gptq
from octavo.compress.grids import Grid, Quantized, quantize
from octavo.compress.healing import best_scales, better_codes, group_index, heal, replace_scales
from octavo.compress.torch.distill import _Layer, distill, divergence, targets
from octavo.errors import UsageError
from octavo.models import build_program
from octavo.program import Linear
from tests.families import FAMILIES, save_family

RNG = np.random.default_rng(21)
COLUMNS = 192


def layer(rows: int = 24) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights, correlated inputs of very different sizes, and the mean of x x^T over these."""
    inputs = RNG.standard_normal((4 * COLUMNS, COLUMNS // 4)) @ RNG.standard_normal(
        (COLUMNS // 4, COLUMNS)
    )
    inputs += RNG.standard_normal(inputs.shape)
    inputs *= np.exp(RNG.standard_normal(COLUMNS))
    x = (RNG.standard_normal((rows, COLUMNS)) * 0.05).astype(np.float32)
    return x, inputs, inputs.T @ inputs / len(inputs)


def lost(x: np.ndarray, q: Quantized, h: np.ndarray) -> np.ndarray:
    """Of each row."""
    d = x.astype(np.float64) - q.values()
    return np.asarray(((d @ h) * d).sum(1))


@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_are_the_least_squares_solution(symmetric: bool) -> None:
    """Those of numpy.linalg.lstsq over the inputs themselves."""
    x, inputs, h = layer()
    grid = Grid(4, 64, symmetric, "f32")
    q = gptq(x, h, grid).weights
    found = best_scales(x, q, h)
    index = group_index(q)
    assert found.codes is q.codes and (found.zeros == q.zeros).all()
    for row in range(len(x)):
        steps = q.codes[row].astype(np.float64) - q.zeros[row][index]
        parts = [inputs[:, index == g] @ steps[index == g] for g in range(q.scales.shape[1])]
        wanted = inputs @ x[row].astype(np.float64)
        expected = np.linalg.lstsq(np.stack(parts, axis=1), wanted, rcond=None)[0]
        np.testing.assert_allclose(found.scales[row], expected, rtol=1e-5)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_no_row_loses_more(bits: int, method: str) -> None:
    """Each half alone, and both in turn; of rounding's error half is gone at least."""
    x, _, h = layer()
    grid = Grid(bits, 64, False)
    q = quantize(x, grid) if method == "rtn" else gptq(x, h, grid).weights
    scales, codes, healed = best_scales(x, q, h), better_codes(x, q, h), heal(x, q, h)
    before = lost(x, q, h) * (1 + 1e-9)
    assert all((lost(x, each, h) <= before).all() for each in (scales, codes, healed))
    assert (scales.codes == q.codes).all() and (codes.scales == q.scales).all()
    assert (healed.scales == healed.scales.astype(np.float16)).all()
    assert healed.codes.max() <= grid.top
    assert lost(x, healed, h).sum() < (0.5 if method == "rtn" else 0.97) * before.sum()


def test_codes_are_the_best_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a sweep changes nothing, no code can be moved by one with less lost; however wide the
    blocks are."""
    x, _, h = layer(4)
    q = quantize(x, Grid(4, 64, True, "f32"))
    found = better_codes(x, q, h, sweeps=100)
    best = lost(x, found, h)
    for column in range(COLUMNS):
        for step in (-1, 1):
            codes = found.codes.astype(np.int32)
            codes[:, column] = np.clip(codes[:, column] + step, 0, 15)
            other = found._replace(codes=codes.astype(np.uint8))
            assert (lost(x, other, h) >= best * (1 - 1e-6)).all()
    monkeypatch.setattr("octavo.compress.healing.COLUMN_BLOCK", 7)
    assert (better_codes(x, q, h, sweeps=100).codes == found.codes).all()


def test_inputs_that_say_little() -> None:
    x, _, h = layer()
    q = quantize(x, Grid())
    for hopeless in (np.zeros_like(h), np.full_like(h, np.nan)):
        left = heal(x, q, hopeless)
        assert (left.values() == q.values()).all()
    one = RNG.standard_normal(COLUMNS)
    single = heal(x, q, np.outer(one, one))
    assert np.isfinite(single.values()).all()
    assert (lost(x, single, np.outer(one, one)) <= lost(x, q, np.outer(one, one))).all()
    dead = h.copy()
    dead[:, :64] = dead[:64] = 0
    part = heal(x, q, dead)
    assert (part.codes[:, :64] == q.codes[:, :64]).all()
    np.testing.assert_allclose(part.scales[:, 0], q.scales[:, 0], rtol=2**-10)
    nothing = quantize(np.zeros_like(x), Grid())
    assert (heal(np.zeros_like(x), nothing, h).values() == 0).all()
    with pytest.raises(UsageError, match="not finite"):
        heal(np.full_like(x, np.inf), q, h)


# -- scales that are learned ------------------------------------------------------------------


def test_gradients_of_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 those that torch finds for the same product written out."""
    x, inputs, h = layer()
    q = gptq(x, h, Grid(4, 64, False)).weights
    own = _Layer(q, torch.float32)
    y = torch.from_numpy(inputs[:32].astype(np.float32)).requires_grad_()
    grad = torch.from_numpy(RNG.standard_normal((32, len(x))).astype(np.float32))
    own(y).backward(grad)
    factors = torch.ones(q.scales.shape, requires_grad=True)
    spread = factors[:, torch.from_numpy(group_index(q))]
    z = y.detach().clone().requires_grad_()
    torch.nn.functional.linear(z, torch.from_numpy(q.values()) * spread).backward(grad)
    assert torch.allclose(own.factors.grad, factors.grad, rtol=1e-4, atol=1e-4)
    assert torch.allclose(y.grad, z.grad, rtol=1e-4, atol=1e-5)
    assert (own.learned() == q.scales).all()


def test_divergence_is_that_of_all_tokens() -> None:
    """Exact where every follower is kept but one; zero for the same logits."""
    logits = torch.from_numpy(RNG.standard_normal((6, 100)).astype(np.float32))
    other = logits + torch.from_numpy(RNG.standard_normal((6, 100)).astype(np.float32))
    p, q = logits.log_softmax(-1), other.log_softmax(-1)
    assert torch.allclose(
        divergence(other, targets(logits)), (p.exp() * (p - q)).sum(-1).mean(), rtol=1e-4
    )
    assert abs(float(divergence(logits, targets(logits)))) < 1e-6


def test_scales_are_learned(tmp_path: Path) -> None:
    """A small model's next tokens come nearer to the original's on texts that were held back; the
    codes stay, and scales are what files hold. Texts that teach nothing change nothing."""
    save_family(FAMILIES["llama"], tmp_path)
    program, rng = build_program(open_checkpoint(tmp_path)), np.random.default_rng(0)
    linear = [op for op in program.ops if isinstance(op, Linear) and op.out != program.output]
    weights = {}
    for op in linear:
        q = quantize(dequantize(op.weight.tensor), Grid(4, 32, False))
        wrong = q.scales * np.exp(0.2 * rng.standard_normal(q.scales.shape))
        weights[op.weight.tensor.name] = replace_scales(q, wrong)
    texts = [[int(i) for i in rng.integers(0, 250, 32)] for _ in range(17)]
    found = distill(program, weights, texts, passes=2, held_back=3, rate=1e-2)
    assert found.after < 0.8 * found.before
    for name, q in found.weights.items():
        assert (q.codes == weights[name].codes).all() and (q.zeros == weights[name].zeros).all()
        assert (q.scales == q.scales.astype(np.float16)).all()
    mean = [0.0, 0.0]
    for at, chosen in enumerate((weights, found.weights)):
        values = {n: q.values() for n, q in chosen.items()}
        rounded = Reference(program, lambda t, v=values: v.get(t.name, dequantize(t)))
        for text in texts[-3:]:
            wanted = targets(Reference(program).logits(text))
            mean[at] += float(divergence(rounded.logits(text), wanted)) / 3
    assert mean == pytest.approx([found.before, found.after], rel=0.05)
    alone = distill(program, weights, texts[:1])
    assert alone.weights == weights and alone.after == alone.before
    harmful = distill(program, weights, texts, held_back=3, rate=10.0)
    assert harmful.weights == weights and harmful.after == harmful.before
