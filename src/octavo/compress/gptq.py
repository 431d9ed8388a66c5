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

from octavo.compress.fit import F32, F64, I32, divide
from octavo.compress.grids import Grid, Quantized, quantize

UPDATE_COLUMNS = 128  # columns after which the rest of the matrix is updated
MOST_DAMPING = 1.0  # of the diagonal's mean, at which the inputs say nothing any more


@dataclass(frozen=True, slots=True)
class Fitted:
    """A rounded layer. error: of its outputs, as a share of their mean square; plain_error: that of
    rounding to the nearest; damping: what H needed, None where that is what was done."""

    weights: Quantized
    error: float
    plain_error: float
    damping: float | None


def output_error(x: F32, q: F32, hessian: F64) -> float:
    """tr((W - Q) H (W - Q)^T) / tr(W H W^T): the mean square of what outputs lose, of their own."""
    d, w = (x - q).astype(np.float64), x.astype(np.float64)
    whole = float(((w @ hessian) * w).sum())
    return float(((d @ hessian) * d).sum()) / whole if whole > 0 else 0.0


def gptq(
    x: F32, hessian: F64, grid: Grid, *, act_order: bool = True, static_groups: bool = True,
    damping: float = 0.01,
) -> Fitted:  # fmt: skip
    """Rounds `[rows, columns]` weights given H `[columns, columns]`.

    act_order: columns of large inputs first. static_groups: scales come from the weights as they
    were, and groups are neighbours whatever the order; else a group's scale is chosen when its turn
    comes, and with act_order its columns are anywhere (`Quantized.group_of`). damping: of the mean
    of H's diagonal, added to it; ten times as much where H cannot be inverted, until rounding
    to the nearest is what is left. What is no better than that is not returned.
    Raises UsageError as `quantize` does.
    """
    importance = np.maximum(np.diag(hessian), 0).astype(np.float32)
    plain = quantize(x, grid, importance)
    plain_error = output_error(x, plain.values(), hessian)
    used: float | None = damping
    order = np.argsort(-importance, kind="stable") if act_order else np.arange(x.shape[1])
    factor = None
    while used is not None and used <= MOST_DAMPING:
        factor = _inverse_factor(hessian, order, used)
        if factor is not None:
            break
        used *= 10
    if factor is None:
        return Fitted(plain, plain_error, plain_error, None)
    found = _Columns(x, factor, grid, order, importance, plain if static_groups else None).round()
    error = output_error(x, found.values(), hessian)
    if not error <= plain_error:
        return Fitted(plain, plain_error, plain_error, None)
    return Fitted(found, error, plain_error, used)


def _inverse_factor(hessian: F64, order: npt.NDArray[np.intp], damping: float) -> F64 | None:
    """U of U^T U = H^-1, H damped and its columns in order; None if there is no inverse."""
    h = hessian[np.ix_(order, order)].astype(np.float64)
    diagonal = np.diag(h).copy()
    mean = float(diagonal.mean())
    if not np.isfinite(h).all() or mean <= 0:
        return None
    # An input that is never there has no say: its column is rounded by itself.
    diagonal[diagonal <= 0] = mean
    np.fill_diagonal(h, diagonal + damping * mean)
    try:
        lower = np.linalg.cholesky(h[::-1, ::-1]).astype(np.float64, copy=False)
    except np.linalg.LinAlgError:
        return None
    # H = R R^T with R upper, L turned round; so H^-1 = U^T U with U = R^-1.
    _invert_lower(lower)
    return np.ascontiguousarray(lower[::-1, ::-1])


def _invert_lower(x: F64) -> None:
    """Inverts a lower triangular matrix where it lies."""
    n = len(x)
    if n <= 64:
        x[:] = np.tril(np.linalg.inv(x))
        return
    a, b, c = x[: n // 2, : n // 2], x[n // 2 :, : n // 2], x[n // 2 :, n // 2 :]
    _invert_lower(a)
    _invert_lower(c)
    b[:] = -(c @ b) @ a


class _Columns:
    """One layer while it is rounded. static: where its scales come from, None: as turns come."""

    def __init__(
        self, x: F32, factor: F64, grid: Grid, order: npt.NDArray[np.intp], importance: F32,
        static: Quantized | None,
    ) -> None:  # fmt: skip
        self.rest = x[:, order].astype(np.float64)
        self.factor, self.grid, self.order, self.importance = factor, grid, order, importance
        self.static = static
        rows, self.columns = x.shape
        self.width = grid.group or self.columns
        groups = self.columns // self.width
        self.codes = np.zeros(x.shape, np.uint8)
        self.scales = np.zeros((rows, groups), np.float32)
        self.zeros = np.full((rows, groups), grid.middle, np.int32)
        if static is not None:
            self.scales, self.zeros = static.scales, static.zeros

    def round(self) -> Quantized:
        for begin in range(0, self.columns, UPDATE_COLUMNS):
            end = min(begin + UPDATE_COLUMNS, self.columns)
            errors = np.zeros((len(self.rest), end - begin))
            for i in range(begin, end):
                if self.static is None and i % self.width == 0:
                    self._choose(i, begin, errors)
                errors[:, i - begin] = self._column(i, end)
            self.rest[:, end:] -= errors @ self.factor[begin:end, end:]
        codes = np.empty_like(self.codes)
        codes[:, self.order] = self.codes
        index: I32 | None = None
        if self.static is None and (self.order != np.arange(self.columns)).any():
            index = np.empty(self.columns, np.int32)
            index[self.order] = np.arange(self.columns) // self.width
        return Quantized(self.grid, codes, self.scales, self.zeros, index)

    def _column(self, i: int, end: int) -> F64:
        """Rounds the i-th column in order and passes its error on within the block."""
        group = (int(self.order[i]) if self.static is not None else i) // self.width
        scale, zero = self.scales[:, group], self.zeros[:, group]
        value = self.rest[:, i]
        steps = np.rint(divide(value.astype(np.float32), scale)) + zero
        self.codes[:, i] = np.clip(steps, 0, self.grid.top)
        decoded = scale.astype(np.float64) * (self.codes[:, i].astype(np.int32) - zero)
        error: F64 = (value - decoded) / self.factor[i, i]
        self.rest[:, i + 1 : end] -= error[:, None] * self.factor[i, i + 1 : end]
        return error

    def _choose(self, i: int, begin: int, errors: F64) -> None:
        """Scales of the group that begins at i, from its columns as they are by now."""
        end = min(i + self.width, self.columns)
        now = self.rest[:, i:end].copy()
        last = min(begin + UPDATE_COLUMNS, self.columns)
        if end > last:  # what lies beyond the block has not heard of its errors yet
            beyond = self.factor[begin:i, last:end]
            now[:, last - i :] -= errors[:, : i - begin] @ beyond
        own = Grid(self.grid.bits, 0, self.grid.symmetric, self.grid.scales)
        found = quantize(now.astype(np.float32), own, self.importance[self.order[i:end]])
        group = i // self.width
        self.scales[:, group], self.zeros[:, group] = found.scales[:, 0], found.zeros[:, 0]
