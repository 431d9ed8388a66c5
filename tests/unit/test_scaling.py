"""AWQ, clipping and SmoothQuant: products stay what they are, errors are no larger than rounding's."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.compress.awq import Foldable, balanced, best_scales
from octavo.compress.clipping import clip_quantize, range_quantize
from octavo.compress.folding import Producer, fold_rows, storable
from octavo.compress.gptq import Outputs
from octavo.compress.grids import Grid, quantize, rounded
from octavo.compress.smoothquant import STATIC, int8_inputs, smoothing_scales, w8a8
from octavo.compress.statistics import InputStatistics
from octavo.errors import UsageError

RNG = np.random.default_rng(11)
COLUMNS = 128


def inputs_of(tokens: int = 512, columns: int = COLUMNS) -> tuple[np.ndarray, InputStatistics]:
    """Correlated inputs with a few features that are far larger than the others."""
    x = RNG.standard_normal((tokens, columns // 4)) @ RNG.standard_normal((columns // 4, columns))
    x += RNG.standard_normal(x.shape)
    x[:, ::17] *= 30
    seen = InputStatistics(columns)
    seen.update(x.astype(np.float32))
    return x.astype(np.float32), seen


def weights_of(*rows: int, columns: int = COLUMNS) -> list[np.ndarray]:
    return [(RNG.standard_normal((n, columns)) * 0.05).astype(np.float32) for n in rows]


def hessian(seen: InputStatistics) -> np.ndarray:
    return seen.gram.astype(np.float64) / seen.tokens


def as_it_is(scales: np.ndarray) -> np.ndarray:
    return scales


def test_folding_powers_of_two_changes_no_bit() -> None:
    """(x / s) (W s)^T is x W^T, and a producer's rows, its bias and norms give x / s."""
    x, _ = inputs_of(16)
    (w, made) = weights_of(48, COLUMNS)
    s = np.exp2(RNG.integers(-6, 6, COLUMNS)).astype(np.float32)
    folded = w * s
    assert ((x / s) * folded[0] == x * w[0]).all() and ((x / s) @ folded.T == x @ w.T).all()
    bias = made[0].copy()
    assert ((x @ made.T + bias) / s == x @ fold_rows(made, s).T + fold_rows(bias, s)).all()
    assert (fold_rows(bias, s, 1.0) == (bias + 1) / s - 1).all()


def test_folding_any_scale_keeps_products_within_rounding() -> None:
    x, _ = inputs_of(16)
    (w,) = weights_of(48)
    s = np.exp(RNG.standard_normal(COLUMNS)).astype(np.float32)
    # Each factor of a product is rounded once, so is the product, and n of these are added up.
    bound = (COLUMNS + 3) * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(w.T))
    exact = x.astype(np.float64) @ w.T
    assert (np.abs((x / s) @ (w * s).T - exact) <= bound).all()


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_are_divided_without_a_rounding_error(offset: float) -> None:
    """norm / s is a bf16 number, and s times it the norm again within an fp32 rounding."""
    norm = rounded(np.exp(RNG.standard_normal(256)).astype(np.float32), "bf16")
    norm[:3] = -offset  # weights of zero
    wanted = np.exp(RNG.standard_normal(256)).astype(np.float32)
    s = storable(wanted, norm, offset, "bf16")
    stored = rounded(fold_rows(norm, s, offset), "bf16")
    assert (
        np.abs((stored + offset) * s - (norm + offset)) <= 2.0**-23 * np.abs(norm + offset)
    ).all()
    assert (np.abs(s / wanted - 1) <= 2.0**-7).mean() > 0.9


def test_heads_that_share_values_share_scales() -> None:
    rows = np.array([0, 1, 0, 1, 2, 3, 2, 3], np.int32)
    scales = np.exp2(np.arange(8)).astype(np.float32)
    shared = Producer((), rows).shared(scales)
    assert (shared == np.float32([2, 4, 2, 4, 32, 64, 32, 64])).all()
    assert (Producer((), rows).of_rows(shared) == np.float32([2, 4, 32, 64])).all()


def awq(
    weights: list[np.ndarray], seen: InputStatistics, grid: Grid, foldable: Foldable
) -> tuple[np.ndarray | None, float]:
    """The scales found, and what outputs lose with them."""
    h = hessian(seen)
    scales = best_scales(weights, seen.mean_abs, h, grid, foldable)[1]
    s = np.ones(COLUMNS, np.float32) if scales is None else scales
    values = [clip_quantize(w * s, h / np.outer(s, s), grid).values() / s for w in weights]
    return scales, Outputs(np.concatenate(weights), h).error(np.concatenate(values))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [3, 4])
def test_awq_loses_less_than_rounding(bits: int, symmetric: bool) -> None:
    _, seen = inputs_of()
    weights, h = weights_of(32, 48), hessian(seen)
    grid = Grid(bits, 64, symmetric)
    scales, error = awq(weights, seen, grid, as_it_is)
    plain = [quantize(w, grid).values() for w in weights]
    clipped = [clip_quantize(w, h, grid).values() for w in weights]
    both = np.concatenate(weights)
    assert scales is not None
    assert error < Outputs(both, h).error(np.concatenate(clipped))
    assert error < 0.5 * Outputs(both, h).error(np.concatenate(plain))


def test_awq_measures_what_the_producer_can_take() -> None:
    """Scales that are no use are not taken."""
    _, seen = inputs_of()
    (w,), grid = weights_of(32), Grid(4, 64, False)
    powers, error = awq([w], seen, grid, lambda s: np.exp2(np.rint(np.log2(s))))
    assert powers is not None and (np.frexp(powers)[0] == 0.5).all()
    assert error < Outputs(w, hessian(seen)).error(clip_quantize(w, hessian(seen), grid).values())
    for useless in (np.nan, 0.0, -1.0):
        assert awq([w], seen, grid, lambda s, u=useless: np.full_like(s, u))[0] is None


@pytest.mark.parametrize(("columns", "group", "taken"), [(192, 128, 64), (96, 64, 32), (128, 0, 0), (128, 64, 64)])  # fmt: skip
def test_awq_tries_groups_that_divide(
    columns: int, group: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, seen = inputs_of(columns=columns)
    tried = set()

    def quantized(x: np.ndarray, grid: Grid) -> np.ndarray:
        tried.add(grid.group)
        return range_quantize(x, grid)

    monkeypatch.setattr("octavo.compress.awq.range_quantize", quantized)
    weights, grid = weights_of(32, 48, columns=columns), Grid(4, group, False)
    assert best_scales(weights, seen.mean_abs, hessian(seen), grid, as_it_is)[1] is not None
    assert tried == {taken}


@pytest.mark.parametrize("symmetric", [True, False])
def test_clipping_minimises_what_outputs_lose(symmetric: bool) -> None:
    """Group by group no more than grids that span the range, with inputs of the group alone."""
    _, seen = inputs_of()
    (w,), grid = weights_of(48), Grid(3, 64, symmetric)
    h = np.kron(np.eye(2), np.ones((64, 64))) * hessian(seen)
    lost = [
        ((d @ h) * d).sum(1)
        for d in (w - clip_quantize(w, h, grid).values(), w - range_quantize(w, grid))
    ]
    assert (lost[0] <= lost[1] * (1 + 1e-5)).all() and lost[0].sum() < 0.9 * lost[1].sum()


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_smoothquant_loses_less(activations: str) -> None:
    x, seen = inputs_of()
    weights = weights_of(32, 48)
    plain = w8a8(weights, seen, activations, None)
    smooth = w8a8(weights, seen, activations, as_it_is)
    assert plain.scales is None and plain.error == plain.plain_error == smooth.plain_error
    assert smooth.scales is not None and smooth.error < 0.8 * plain.error
    wanted = np.concatenate([x @ w.T for w in weights], axis=1)
    made = np.concatenate(
        [int8_inputs(x / smooth.scales, smooth.input_scale) @ q.values().T for q in smooth.weights],
        axis=1,
    )
    assert ((made - wanted) ** 2).mean() / (wanted**2).mean() == pytest.approx(
        smooth.error, rel=0.3
    )


def test_one_step_where_it_loses_no_more() -> None:
    """Tokens that are as large as each other need no steps of their own; beside one that is much
    larger they do."""
    x, weights = inputs_of(256)[0], weights_of(32, 48)
    x /= np.abs(x).max(1, keepdims=True)
    alike, apart = InputStatistics(COLUMNS), InputStatistics(COLUMNS)
    alike.update(x)
    x[7] *= 30
    apart.update(x)
    for seen, one in ((alike, True), (apart, False)):
        fixed, own = (w8a8(weights, seen, each, None) for each in ("static", "dynamic"))
        assert own.input_scale is None and (fixed.input_scale is not None) == one
        assert own.error <= fixed.error <= own.error * STATIC
    assert fixed.error == own.error


def test_inputs_as_int8() -> None:
    """No input is off by more than half a step, and the largest of a token is held exactly."""
    x, _ = inputs_of(64)
    step = np.abs(x).max(1, keepdims=True) / 127
    held = int8_inputs(x)
    assert (np.abs(held - x) <= step * (0.5 + 1e-5)).all()
    assert (np.rint(held / step) == np.clip(np.rint(x / step), -128, 127)).all()
    static = int8_inputs(x, 0.25)
    assert (static == np.clip(np.rint(x * 4), -128, 127) / 4).all()
    assert (int8_inputs(np.zeros((2, 3), np.float32)) == 0).all()
    assert smoothing_scales(
        [np.zeros((2, 3), np.float32)], np.zeros(3, np.float32), 0.5
    ).tolist() == [1, 1, 1]


def test_inputs_that_say_little() -> None:
    """No input at all, one token, features that are always zero, layers of zeros; NaN is refused."""
    none, one = InputStatistics(COLUMNS), InputStatistics(COLUMNS)
    one.update(inputs_of(1)[0])
    dead, part = inputs_of(64)[0], InputStatistics(COLUMNS)
    dead[:, ::3] = 0
    part.update(dead)
    zeros = np.zeros((32, COLUMNS), np.float32)
    for seen in (none, one, part):
        h = seen.gram.astype(np.float64) / max(1, seen.tokens)
        for w in (zeros, *weights_of(32)):
            scales = best_scales([w], seen.mean_abs, h, Grid(), as_it_is)[1]
            s = np.ones(COLUMNS, np.float32) if scales is None else scales
            assert np.isfinite(s).all() and (s > 0).all()
            q = clip_quantize(w * s, h / np.outer(s, s), Grid())
            assert np.isfinite(q.values()).all() and (q.values().any() or not w.any())
            plain = w8a8([w], seen, "static", None)
            smooth = w8a8([w], seen, "static", as_it_is)
            assert smooth.error <= smooth.plain_error == plain.error
            assert np.isfinite(smooth.weights[0].values()).all()
    wrong = np.full((32, COLUMNS), np.nan, np.float32)
    with pytest.raises(UsageError, match="not finite"):
        w8a8([wrong], one, "dynamic", as_it_is)
    with pytest.raises(UsageError, match="whole groups"):
        clip_quantize(zeros[:, :100], np.eye(100), Grid())
    assert (balanced(np.float32([0.25, 1, 4])) == np.float32([0.25, 1, 4])).all()
