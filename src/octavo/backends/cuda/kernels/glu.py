"""Operations on elements: sums of slices, gated activations, permutations."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.backends.cuda.kernels.common import (
    FOLLOWING,
    activate,
    follow,
    gated,
    stride,
    summed,
    tanh,
)

BLOCK = 1024


@triton.jit
def _combine(
    x, bias, residual, out, act, width, x_part, x_row, residual_row, out_row, act_row, cap,
    PARTS: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    follow()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    y = summed(x, row * x_row + at, mask, x_part, PARTS)
    if bias is not None:
        y += tl.load(bias + at, mask, other=0.0)
    if residual is not None:
        y = tl.load(residual + row * residual_row + at, mask, other=0.0) + y
    if CAPPED:
        y = cap * tanh(y / cap)
    if out is not None:
        tl.store(out + row * out_row + at, y, mask)
    if act is not None:
        tl.store(act + row * act_row + at, y.to(tl.bfloat16), mask)


@triton.jit
def _glu(
    gate, up, gate_bias, up_bias, act, width, gate_part, gate_row, up_part, up_row, act_row,
    GATE_PARTS: tl.constexpr, UP_PARTS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    follow()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    g = summed(gate, row * gate_row + at, mask, gate_part, GATE_PARTS)
    if gate_bias is not None:
        g += tl.load(gate_bias + at, mask, other=0.0)
    if up is None:
        y = activate(g, KIND)
    else:
        u = summed(up, row * up_row + at, mask, up_part, UP_PARTS)
        if up_bias is not None:
            u += tl.load(up_bias + at, mask, other=0.0)
        y = gated(g, u, KIND)
    tl.store(act + row * act_row + at, y.to(tl.bfloat16), mask)


@triton.jit
def _permute(x, order, act, width, x_row, act_row, BLOCK: tl.constexpr):
    follow()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    y = tl.load(x + row * x_row + tl.load(order + at, mask, other=0), mask, other=0.0)
    tl.store(act + row * act_row + at, y.to(tl.bfloat16), mask)


def combine(x, bias, residual, out, act, *, cap):
    """out, act = residual + sum(x) + bias, capped where `cap` > 0."""
    parts, rows, width = x.shape
    _combine[(rows, triton.cdiv(width, BLOCK))](
        x, bias, residual, out, act, width, x.stride(0), x.stride(1), stride(residual),
        stride(out), stride(act), float(cap), PARTS=parts, CAPPED=cap > 0, BLOCK=BLOCK, **FOLLOWING,
    )  # fmt: skip


def glu(gate, up, gate_bias, up_bias, act, *, activation):
    """act = activation(gate) * up, or the activation of gate alone."""
    parts, rows, width = gate.shape
    _glu[(rows, triton.cdiv(width, BLOCK))](
        gate, up, gate_bias, up_bias, act, width, gate.stride(0), gate.stride(1), stride(up),
        stride(up, 1), act.stride(0), GATE_PARTS=parts, UP_PARTS=1 if up is None else up.shape[0],
        KIND=activation, BLOCK=BLOCK, **FOLLOWING,
    )  # fmt: skip


def permute(x, order, act):
    """act[:, i] = x[:, order[i]]."""
    rows, width = x.shape[0], order.shape[0]
    _permute[(rows, triton.cdiv(width, BLOCK))](
        x, order, act, width, x.stride(0), act.stride(0), BLOCK=BLOCK, **FOLLOWING,
    )  # fmt: skip
