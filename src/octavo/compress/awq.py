"""AWQ: scales features so that the columns that count are rounded finely.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration"
(arXiv:2306.00978). Columns are multiplied with s and inputs divided by it, where what makes them
can take that (`folding.py`); s = mean|x|^a, or mean|x|^a / mean|w|^(1 - a), with the a of least
output error; then groups are clipped (`clipping.py`). The paper measures the error on samples; here
it is tr(D H D^T) for weights' errors D and H the mean of x x^T, which is the same over all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.compress.clipping import clip_quantize
from octavo.compress.fit import F32, divide
from octavo.compress.grids import Grid, Quantized, check_finite, quantize
from octavo.compress.statistics import InputStatistics

F64 = npt.NDArray[np.float64]
ALPHAS = tuple(i / 20 for i in range(1, 13))
ROWS = 64  # of each matrix, that exponents are tried on
SMALLEST = np.float32(1e-4)  # of scales before they are balanced
Settle = Callable[[F32], F32]


@dataclass(frozen=True, slots=True)
class Scaled:
    """Layers of one input, rounded. weights: of columns times `scales`, which is None where inputs
    stay as they are; error: of all outputs, as a share of their mean square; plain_error: that
    of rounding to the nearest."""

    weights: tuple[Quantized, ...]
    scales: F32 | None
    alpha: float
    error: float
    plain_error: float


def awq(
    weights: Sequence[F32], inputs: InputStatistics, grid: Grid, settle: Settle | None
) -> Scaled:
    """Rounds the `[outputs, inputs]` weights of layers that share an input.

    settle: makes scales wanted into scales that the input's producer takes; None: there is none, so
    that groups are clipped only. What is no better than rounding to the nearest is not returned.
    Raises UsageError as `quantize` does.
    """
    for x in weights:
        check_finite(x)
    hessian = inputs.gram.astype(np.float64) / max(1, inputs.tokens)
    energy = sum(_lost(x, hessian) for x in weights)
    plain = tuple(quantize(x, grid) for x in weights)
    plain_lost = sum(_lost(x - q.values(), hessian) for x, q in zip(weights, plain, strict=True))
    found: list[tuple[float, tuple[Quantized, ...], float, F32 | None]]
    found = [(plain_lost, plain, 0.0, None)]
    options: list[tuple[float, F32 | None]] = [(0.0, None)]
    if settle is not None:
        alpha, scales = best_scales(weights, inputs.mean_abs, hessian, grid, settle)
        options += [(alpha, scales)] if scales is not None else []
    for alpha, scales in options:
        s = np.ones(len(hessian), np.float32) if scales is None else scales
        found.append((*_lost_with(weights, s, hessian, grid), alpha, scales))
    lost, made, alpha, scales = min(found, key=lambda f: f[0])
    share = 1 / energy if energy > 0 else 0.0
    return Scaled(made, scales, alpha, lost * share, plain_lost * share)


def best_scales(
    weights: Sequence[F32], mean_abs: F32, hessian: F64, grid: Grid, settle: Settle
) -> tuple[float, F32 | None]:
    """The exponent and scales of least output error of some rows; None for none."""
    size = _relative_sizes(weights, grid.group or len(mean_abs))
    some = [x[:: -(-len(x) // ROWS)] for x in weights]
    best: tuple[float, float, F32 | None] = (np.inf, 0.0, None)
    for by_size in (False, True):
        for alpha in (*(() if by_size else (0.0,)), *ALPHAS):
            wanted = _power(mean_abs, alpha)
            if by_size:
                wanted = wanted / _power(size, 1 - alpha)
            s = settle(balanced(wanted)) if alpha or by_size else np.ones_like(mean_abs)
            if not (np.isfinite(s).all() and (s > 0).all()):
                continue
            lost = _lost_with(some, s, hessian, grid)[0]
            if lost < best[0]:
                best = lost, alpha, s if alpha or by_size else None
    return best[1], best[2]


def _power(x: F32, exponent: float) -> F32:
    return np.asarray(np.maximum(x, SMALLEST) ** np.float32(exponent), np.float32)


def balanced(scales: F32) -> F32:
    """Scales with the geometric mean of the largest and the smallest at 1."""
    scales = np.maximum(scales, SMALLEST)
    return np.asarray(scales / np.sqrt(scales.max() * scales.min()), np.float32)


def _relative_sizes(weights: Sequence[F32], width: int) -> F32:
    """The mean over rows of a column's magnitude, of the largest of its group."""
    total, rows = np.zeros(weights[0].shape[1]), 0
    for x in weights:
        groups = np.abs(x).reshape(len(x), -1, width)
        total += divide(groups, groups.max(-1, keepdims=True)).reshape(x.shape).sum(0)
        rows += len(x)
    return (total / max(1, rows)).astype(np.float32)


def _lost_with(
    weights: Sequence[F32], s: F32, hessian: F64, grid: Grid
) -> tuple[float, tuple[Quantized, ...]]:
    """What outputs lose, and the rounded columns times s."""
    made = tuple(clip_quantize(x * s, hessian / np.outer(s, s), grid) for x in weights)
    return sum(_lost(x - q.values() / s, hessian) for x, q in zip(weights, made, strict=True)), made


def _lost(d: F32, hessian: F64) -> float:
    """tr(D H D^T)."""
    return max(0.0, float(((d.astype(np.float64) @ hessian) * d).sum()))
