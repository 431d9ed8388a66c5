"""AWQ: scales features so that the columns that count are rounded finely.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration"
(arXiv:2306.00978). Columns are multiplied with s and inputs divided by it, where what makes them
can take that (`folding.py`); s = mean|x|^a, or mean|x|^a / mean|w|^(1 - a), with the a of least
output error on grids that span each group; then groups are clipped (`clipping.py`). The paper
measures the error on samples; here it is tr(D H D^T) for weights' errors D and H the mean of x x^T,
which is the same over all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from octavo.compress.clipping import range_quantize
from octavo.compress.fit import F32, Hessian, divide
from octavo.compress.gptq import energy
from octavo.compress.grids import Grid, largest_group

ALPHAS = tuple(i / 10 for i in range(1, 7))
ROWS = 64  # of each matrix, that exponents are tried on
SMALLEST = np.float32(1e-4)  # of scales before they are balanced
Foldable = Callable[[F32], F32]


def best_scales(
    weights: Sequence[F32], mean_abs: F32, hessian: Hessian, grid: Grid, foldable: Foldable
) -> tuple[float, F32 | None]:
    """The exponent and scales of least output error of some rows; None for none.

    weights: finite. Where the grid's group does not divide their columns, the largest usual one
    below that does.
    """
    columns = len(mean_abs)
    if grid.group and columns % grid.group:
        grid = replace(grid, group=largest_group(columns, grid.group))
    size = _relative_sizes(weights, grid.group or columns)
    some = [x[:: -(-len(x) // ROWS)] for x in weights]
    best: tuple[float, float, F32 | None] = (np.inf, 0.0, None)
    for by_size in (False, True):
        for alpha in (*(() if by_size else (0.0,)), *ALPHAS):
            wanted = _power(mean_abs, alpha)
            if by_size:
                wanted = wanted / _power(size, 1 - alpha)
            s = foldable(balanced(wanted)) if alpha or by_size else np.ones_like(mean_abs)
            if not (np.isfinite(s).all() and (s > 0).all()):
                continue
            errors = (x - range_quantize(x * s, grid) / s for x in some)
            lost = sum(energy(d, hessian) for d in errors)
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
