"""GPTQ: rounds a layer column by column, each error made up for by the columns still to come.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers"
(arXiv:2210.17323). With H the mean of x x^T over a layer's inputs, the error of outputs is
tr((W - Q) H (W - Q)^T); the columns left absorb what rounding one has cost by H's inverse, whose
Cholesky factor holds every step's at once. Scales are chosen with H's diagonal as importance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.compress.fit import F32, F64, Hessian, steps_of
from octavo.compress.grids import Grid, Quantized, quantize

WIDENED = 512  # rows of weights and columns of H that are fp64 at a time
UPDATE_COLUMNS = 64  # columns after which the rest of the matrix is updated
PANEL = 256  # columns of a factor that are computed together
MOST_DAMPING = 1.0  # of the diagonal's mean, at which the inputs say nothing any more


@dataclass(frozen=True, slots=True)
class Fitted:
    """A rounded layer. error: of its outputs, as a share of their mean square; plain_error: that of
    rounding to the nearest; damping: what H needed, None where that is what was done."""

    weights: Quantized
    error: float
    plain_error: float
    damping: float | None


class Outputs:
    """What a layer's outputs lose, tr(D H D^T) / tr(W H W^T): the mean square of the difference, of
    their own. D: weights `[rows, columns]` less what they are rounded to."""

    def __init__(self, x: F32, hessian: Hessian) -> None:
        self._x, self._hessian = x, hessian
        self._whole = float(np.einsum("rc,rc->", x @ hessian, x, dtype=np.float64))

    def error(self, q: F32) -> float:
        return energy(self._x - q, self._hessian) / self._whole if self._whole > 0 else 0.0


def energy(x: F32, hessian: Hessian) -> float:
    """tr(X H X^T) in fp64, to which a part at a time is widened."""
    total = 0.0
    for begin in range(0, x.shape[1], WIDENED):
        columns = slice(begin, begin + WIDENED)
        part = hessian[:, columns].astype(np.float64, copy=False)
        for first in range(0, len(x), WIDENED):
            wide = x[first : first + WIDENED].astype(np.float64)
            total += float(np.einsum("rc,rc->", wide @ part, wide[:, columns]))
    return total


def gptq(x: F32, hessian: Hessian, grid: Grid, *, damping: float = 0.01) -> Fitted:
    """Rounds `[rows, columns]` weights given H `[columns, columns]`, columns of large inputs first.

    Scales come from the weights as they were, so groups are neighbours whatever the order. damping:
    of the mean of H's diagonal, added to it; ten times as much where H cannot be inverted, until
    rounding to the nearest is what is left. What is no better than that is not returned.
    Raises UsageError as `quantize` does.
    """
    importance = np.maximum(np.diag(hessian), 0).astype(np.float32)
    plain, outputs = quantize(x, grid, importance), Outputs(x, hessian)
    plain_error = outputs.error(plain.values())
    used: float | None = damping
    order = np.argsort(-importance, kind="stable")
    factor = None
    while used is not None and used <= MOST_DAMPING:
        factor = _inverse_factor(hessian, order, used)
        if factor is not None:
            break
        used *= 10
    if factor is None:
        return Fitted(plain, plain_error, plain_error, None)
    found = _Columns(x, factor, order, plain).round()
    del factor  # which is as large as two of H
    error = outputs.error(found.values())
    if not error <= plain_error:
        return Fitted(plain, plain_error, plain_error, None)
    return Fitted(found, error, plain_error, used)


def _inverse_factor(hessian: Hessian, order: npt.NDArray[np.intp], damping: float) -> F64 | None:
    """U of U^T U = H^-1, H damped and its columns in order; None if there is no inverse."""
    diagonal = np.diag(hessian)[order[::-1]].astype(np.float64)
    mean = float(diagonal.mean())
    if not np.isfinite(mean) or mean <= 0:
        return None
    # With H's columns turned round: H = L L^T, and U is L^-1 turned round again.
    x, turned = np.empty(hessian.shape), order[::-1]
    for begin in range(0, len(x), PANEL):
        rows = slice(begin, begin + PANEL)
        x[rows] = hessian[np.ix_(turned[rows], turned)]
    # An input that is never there has no say: its column is rounded by itself.
    diagonal[diagonal <= 0] = mean
    np.fill_diagonal(x, diagonal + damping * mean)
    try:
        _cholesky(x)
    except np.linalg.LinAlgError:
        return None
    _invert_lower(x)
    return x[::-1, ::-1] if np.isfinite(x).all() else None


def _cholesky(x: F64) -> None:
    """Makes L of a symmetric matrix L L^T in its lower triangle; what lies above is left. Raises
    LinAlgError."""
    n = len(x)
    for begin in range(0, n, PANEL):
        end = min(begin + PANEL, n)
        x[begin:end, begin:end] = np.linalg.cholesky(x[begin:end, begin:end])
        x[end:, begin:end] = x[end:, begin:end] @ np.linalg.inv(x[begin:end, begin:end]).T
        for first in range(end, n, PANEL):
            below = x[first:, begin:end]
            x[first:, first : first + PANEL] -= below @ below[:PANEL].T


def _invert_lower(x: F64) -> None:
    """Inverts a lower triangular matrix where it lies; above are zeros then."""
    n = len(x)
    if n <= 64:
        x[:] = np.tril(np.linalg.inv(np.tril(x)))
        return
    a, b, c = x[: n // 2, : n // 2], x[n // 2 :, : n // 2], x[n // 2 :, n // 2 :]
    _invert_lower(a)
    _invert_lower(c)
    for i in range(0, a.shape[1], PANEL):
        b[:, i : i + PANEL] = c @ b[:, i : i + PANEL]
    for i in range(0, len(b), PANEL):
        b[i : i + PANEL] = -b[i : i + PANEL] @ a
    x[: n // 2, n // 2 :] = 0


class _Columns:
    """One layer while it is rounded, its columns one after the other in memory. plain: where its
    scales come from."""

    def __init__(self, x: F32, factor: F64, order: npt.NDArray[np.intp], plain: Quantized) -> None:
        self.rest = np.ascontiguousarray(x[:, order].T, np.float64)
        self.factor, self.order, self.plain = factor, order, plain
        self.columns = x.shape[1]
        self.codes = np.zeros((self.columns, len(x)), np.uint8)
        self.scales, self.zeros = (np.ascontiguousarray(v.T) for v in (plain.scales, plain.zeros))

    def round(self) -> Quantized:
        for begin in range(0, self.columns, UPDATE_COLUMNS):
            end = min(begin + UPDATE_COLUMNS, self.columns)
            errors = np.zeros((end - begin, self.rest.shape[1]))
            for i in range(begin, end):
                errors[i - begin] = self._column(i, end)
            for first in range(end, self.columns, WIDENED):
                later = slice(first, first + WIDENED)
                self.rest[later] -= self.factor[begin:end, later].T @ errors
        codes = np.empty_like(self.codes)
        codes[self.order] = self.codes
        return self.plain._replace(codes=np.ascontiguousarray(codes.T))

    def _column(self, i: int, end: int) -> F64:
        """Rounds the i-th column in order and passes its error on within the block."""
        group = int(self.order[i]) // self.plain.width
        scale, zero = self.scales[group], self.zeros[group]
        value = self.rest[i]
        steps = np.clip(steps_of(value.astype(np.float32), scale) + zero, 0, self.plain.grid.top)
        self.codes[i] = steps
        error: F64 = (value - scale.astype(np.float64) * (steps - zero)) / self.factor[i, i]
        self.rest[i + 1 : end] -= self.factor[i, i + 1 : end, None] * error
        return error
