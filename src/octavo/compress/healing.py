"""Heals rounded layers: codes and scales moved in turn to where outputs lose least.

With d the error of a row of weights and H the mean of x x^T over inputs, a row loses d H d^T. For
given codes the scales of all of its groups are a least-squares problem with one solution; for given
scales each code has a best value while the others stay (coordinate descent, as QuantEase does:
Behdin et al., arXiv:2309.01885). Neither step can lose, and the file's format stays what it is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.compress.fit import F32, F64, Hessian
from octavo.compress.grids import CHUNK, Quantized, check_finite, rounded

ROUNDS = 3  # of codes, then scales
SWEEPS = 2  # over the columns in each
COLUMN_BLOCK = 64  # columns after which the rest of a matrix is updated


def heal(x: F32, q: Quantized, hessian: Hessian, rounds: int = ROUNDS) -> Quantized:
    """Codes and scales near `q`'s with which `[rows, columns]` weights lose less of their outputs.

    No row loses more than with `q`. Raises UsageError for weights that are not finite.
    """
    check_finite(x)
    wide = hessian.astype(np.float64, copy=False)
    if not np.isfinite(wide).all():
        return q
    for _ in range(rounds):
        q = best_scales(x, better_codes(x, q, wide), wide)
    return q


def best_scales(x: F32, q: Quantized, hessian: F64) -> Quantized:
    """The least-squares scales for q's codes, rounded to what files hold; a row whose error that
    does not lessen keeps its own."""
    at_once = max(1, CHUNK // max(1, x.shape[1] + q.scales.shape[1] ** 2))
    parts = [
        _row_scales(x[i : i + at_once], rows_of(q, slice(i, i + at_once)), hessian)
        for i in range(0, len(x), at_once)
    ]
    return replace_scales(q, np.concatenate(parts))


def replace_scales(q: Quantized, scales: F32) -> Quantized:
    """The same codes with other scales, rounded to what files hold."""
    return q._replace(scales=rounded(scales.astype(np.float32), q.grid.scales))


def rows_of(q: Quantized, rows: slice) -> Quantized:
    """Some rows of a matrix."""
    return q._replace(codes=q.codes[rows], scales=q.scales[rows], zeros=q.zeros[rows])


def group_index(q: Quantized) -> npt.NDArray[np.int64]:
    """The group of each column."""
    return np.arange(q.codes.shape[1]) // q.width


def _row_scales(x: F32, q: Quantized, hessian: F64) -> F32:
    index = group_index(q)
    steps = q.codes.astype(np.float64) - q.zeros[:, index]
    groups = q.scales.shape[1]
    columns_of = [np.flatnonzero(index == g) for g in range(groups)]
    between = np.empty((len(x), groups, groups))
    for g, columns in enumerate(columns_of):
        pulled = (steps[:, columns] @ hessian[columns]) * steps
        between[:, g] = np.stack([pulled[:, c].sum(axis=1) for c in columns_of], axis=1)
    towards = (x.astype(np.float64) @ hessian) * steps
    wanted = np.stack([towards[:, c].sum(axis=1) for c in columns_of], axis=1)
    old = q.scales.astype(np.float64)
    # Where inputs or codes leave a direction open, scales stay: the smallest change is taken.
    gap = (wanted - np.einsum("rgh,rh->rg", between, old))[..., None]
    change = (np.linalg.pinv(between, rcond=1e-10, hermitian=True) @ gap)[..., 0]
    new = rounded((old + change).astype(np.float32), q.grid.scales)

    def lost(scales: npt.NDArray[np.floating]) -> F64:
        s = scales.astype(np.float64)
        return np.asarray(np.einsum("rg,rgh,rh->r", s, between, s) - 2 * (s * wanted).sum(1))

    better = lost(new) < lost(old)
    return np.where(better[:, None], new, q.scales)


def better_codes(x: F32, q: Quantized, hessian: F64, sweeps: int = SWEEPS) -> Quantized:
    """Codes of less error for q's scales: column by column the best, the others as they are."""
    index = group_index(q)
    scales, zeros = q.scales[:, index].astype(np.float64), q.zeros[:, index]
    codes = q.codes.astype(np.int32)
    order = np.argsort(-np.diag(hessian), kind="stable")
    h = hessian[np.ix_(order, order)]
    scales, zeros, codes = scales[:, order], zeros[:, order], codes[:, order]
    pull = (x[:, order].astype(np.float64) - scales * (codes - zeros)) @ h
    columns = len(order)
    for _ in range(sweeps):
        before = codes.copy()
        for begin in range(0, columns, COLUMN_BLOCK):
            end = min(begin + COLUMN_BLOCK, columns)
            moved = np.zeros((len(x), end - begin))
            for i in range(begin, end):
                if h[i, i] <= 0:
                    continue
                step = _divide(pull[:, i], h[i, i] * scales[:, i])
                wanted = np.clip(np.rint(codes[:, i] + step), 0, q.grid.top).astype(np.int32)
                moved[:, i - begin] = scales[:, i] * (wanted - codes[:, i])
                codes[:, i] = wanted
                pull[:, begin:end] -= moved[:, i - begin, None] * h[i, begin:end]
            pull[:, :begin] -= moved @ h[begin:end, :begin]
            pull[:, end:] -= moved @ h[begin:end, end:]
        if (before == codes).all():
            break
    out = np.empty_like(q.codes)
    out[:, order] = codes
    return q._replace(codes=out)


def _divide(a: F64, b: F64) -> F64:
    """a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros_like(a), where=b != 0)
