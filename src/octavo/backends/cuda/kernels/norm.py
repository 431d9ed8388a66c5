"""Norms of rows that may come as slices: one program a row, its block set by the width alone."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.backends.cuda.kernels.common import FOLLOWING, follow, row_warps, stride, summed


@triton.jit
def _normed(y, weight, shift, at, mask, width, eps, CENTERED: tl.constexpr):
    """y normalized; CENTERED: less its mean."""
    if CENTERED:
        y = tl.where(mask, y - tl.sum(y, 0) / width, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(y * y, 0) / width + eps)
    z = y * scale * tl.load(weight + at, mask, other=0.0)
    return z if shift is None else z + tl.load(shift + at, mask, other=0.0)


@triton.jit
def _add_norm(
    x, bias, residual, weight, shift, total, norm, act, width, x_part, x_row, residual_row,
    total_row, norm_row, act_row, eps,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    follow()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    y = summed(x, row * x_row + at, mask, x_part, PARTS)
    if bias is not None:
        y += tl.load(bias + at, mask, other=0.0)
    if residual is not None:
        y = tl.load(residual + row * residual_row + at, mask, other=0.0) + y
    if total is not None:
        tl.store(total + row * total_row + at, y, mask)
    z = _normed(y, weight, shift, at, mask, width, eps, CENTERED)
    if norm is not None:
        tl.store(norm + row * norm_row + at, z, mask)
    if act is not None:
        tl.store(act + row * act_row + at, z.to(tl.bfloat16), mask)


@triton.jit
def _norm_add(
    x, bias, weight, residual, out, width, x_part, x_row, residual_row, out_row, eps,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    follow()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    y = summed(x, row * x_row + at, mask, x_part, PARTS)
    if bias is not None:
        y += tl.load(bias + at, mask, other=0.0)
    z = _normed(y, weight, None, at, mask, width, eps, False)
    r = tl.load(residual + row * residual_row + at, mask, other=0.0)
    tl.store(out + row * out_row + at, r + z, mask)


def _launch_add_norm(x, bias, residual, weight, shift, total, norm, act, eps, centered):
    parts, rows, width = x.shape
    _add_norm[(rows,)](
        x, bias, residual, weight, shift, total, norm, act, width, x.stride(0), x.stride(1),
        stride(residual), stride(total), stride(norm), stride(act), eps,
        PARTS=parts, BLOCK=triton.next_power_of_2(width), CENTERED=centered,
        num_warps=row_warps(width), **FOLLOWING,
    )  # fmt: skip


def add_norm(x, bias, residual, weight, total, norm, act, *, eps):
    """y = residual + sum(x); total = y; norm, act = y / rms(y) * weight."""
    _launch_add_norm(x, bias, residual, weight, None, total, norm, act, eps, False)


def add_layer_norm(x, bias, residual, weight, shift, total, norm, act, *, eps):
    """Like `add_norm`: less the mean, plus `shift`."""
    _launch_add_norm(x, bias, residual, weight, shift, total, norm, act, eps, True)


def norm_add(x, bias, weight, residual, out, *, eps):
    """out = residual + norm(sum(x))."""
    parts, rows, width = x.shape
    _norm_add[(rows,)](
        x, bias, weight, residual, out, width, x.stride(0), x.stride(1), residual.stride(0),
        out.stride(0), eps, PARTS=parts, BLOCK=triton.next_power_of_2(width),
        num_warps=row_warps(width), **FOLLOWING,
    )  # fmt: skip
