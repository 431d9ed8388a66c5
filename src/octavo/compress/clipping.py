"""Grids for groups of columns, chosen by what outputs lose and not by what weights lose.

Lin et al., "AWQ" (arXiv:2306.00978), search how far the range of each group is clipped so that the
group's share of the outputs changes least. With G the mean of x x^T over the group's columns that
is d G d^T for an error d, exactly; for given codes the best scale is a least-squares solution.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.compress.fit import F32, I32, Hessian, divide
from octavo.compress.grids import CHUNK, Grid, Quantized, codes_on, quantize, rounded
from octavo.compress.pieces import each

SHARES = tuple(1 - i / 20 for i in range(12))  # of the range that grids span
REPEATS = 2  # roundings with the best scale found


def range_grid(x: F32, grid: Grid, share: float = 1) -> tuple[F32, I32]:
    """Scales and zeros of grids that span a share of the range of `[..., n]` numbers."""
    if grid.symmetric:
        at = np.abs(x).argmax(axis=-1)[..., None]
        widest = np.take_along_axis(x, at, axis=-1)[..., 0]
        scales = rounded(widest * np.float32(share / -grid.middle), grid.scales)
        return scales, np.full(scales.shape, grid.middle, np.int32)
    low, high = np.minimum(x.min(axis=-1), 0), np.maximum(x.max(axis=-1), 0)
    low, high = low * np.float32(share), high * np.float32(share)
    scales = rounded((high - low) / np.float32(grid.top), grid.scales)
    return scales, np.clip(np.rint(divide(-low, scales)), 1, grid.top).astype(np.int32)


def range_quantize(x: F32, grid: Grid) -> F32:
    """What `[rows, columns]` weights become on grids that span each group: fast, and no more."""
    groups = x.reshape(-1, grid.group or x.shape[1])
    scales, zeros = range_grid(groups, grid)
    codes = codes_on(groups, scales, zeros, grid).astype(np.float32)
    return (scales[:, None] * (codes - zeros[:, None])).reshape(x.shape)


def clip_quantize(x: F32, hessian: Hessian, grid: Grid) -> Quantized:
    """Rounds `[rows, columns]` weights to the grids whose groups lose least of the outputs.

    Raises UsageError as `grids.quantize` does.
    """
    start = quantize(x, grid, np.maximum(np.diag(hessian), 0).astype(np.float32))
    columns, width = x.shape[1], start.width
    spans = [slice(i, i + width) for i in range(0, columns, width)]
    grams = np.stack([hessian[s, s] for s in spans]).astype(np.float32)
    at_once = max(1, CHUNK // columns)
    found = each(
        len(x),
        at_once,
        lambda rows: _clipped(x[rows], grams, grid, start.scales[rows], start.zeros[rows]),
    )
    codes, scales, zeros = (np.concatenate(each) for each in zip(*found, strict=True))
    return Quantized(grid, codes, scales, zeros)


def _clipped(
    x: F32, grams: F32, grid: Grid, scales: F32, zeros: I32
) -> tuple[npt.NDArray[np.uint8], F32, I32]:
    """Codes `[rows, columns]`, scales and zeros `[rows, groups]` of some rows; among the grids that
    are tried are those given."""
    count, width = grams.shape[:2]
    groups = np.ascontiguousarray(x.reshape(len(x), count, width).transpose(1, 0, 2), np.float32)
    pulled = groups @ grams
    shape = groups.shape[:2]
    best_codes, best_scales, best_zeros = np.zeros(groups.shape, np.uint8), scales.T, zeros.T
    error = np.full(shape, np.inf, np.float32)
    for share in (None, *SHARES, *(None,) * REPEATS):
        scales, zeros = best_scales, best_zeros
        if share is not None:
            scales, zeros = range_grid(groups, grid, share)
        flat = groups.reshape(-1, width), scales.reshape(-1), zeros.reshape(-1)
        codes = codes_on(*flat, grid).reshape(groups.shape)
        steps = codes.astype(np.float32) - zeros[..., None]
        with_x = np.einsum("grn,grn->gr", steps, pulled)
        with_itself = np.einsum("grn,grn->gr", steps, steps @ grams)
        fitted = rounded(divide(with_x, with_itself), grid.scales)
        # A group without inputs says nothing of its scale; then the range does.
        fitted = np.where(with_itself > 0, fitted, scales)
        lost = fitted * (fitted * with_itself - 2 * with_x)
        better = lost < error
        best_codes = np.where(better[..., None], codes, best_codes)
        best_scales = np.where(better, fitted, best_scales)
        best_zeros = np.where(better, zeros, best_zeros)
        error = np.where(better, lost, error)
    return best_codes.transpose(1, 0, 2).reshape(x.shape), best_scales.T, best_zeros.T
