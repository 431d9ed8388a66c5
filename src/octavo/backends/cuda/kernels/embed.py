"""Rows of tables, of what a step gives, and of selected tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.backends.cuda.constants import TILE, up
from octavo.backends.cuda.kernels.common import FOLLOWING, follow, stride
from octavo.backends.cuda.kernels.unpack import factors, place_in_half, place_of_row, value

BLOCK = 1024


@triton.jit
def _embed(
    codes, scales, minima, table, index, out, entries, width, wide, depth, codes_row, out_row,
    scale, offset,
    KIND: tl.constexpr, GROUP: tl.constexpr, MINIMUM: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    follow()
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    row = tl.load(index + t) + offset
    row = tl.minimum(tl.maximum(row, 0), entries - 1)
    if KIND == "bf16":
        y = tl.load(codes + row.to(tl.int64) * codes_row + at, mask, other=0.0)
    else:
        tile = (row // TILE).to(tl.int64) * depth + at // TILE
        column = at % TILE
        place = place_in_half(row % TILE, column)
        half: tl.constexpr = TILE * TILE // 2
        nibbles: tl.constexpr = KIND == "int4" or KIND == "table4"
        if nibbles:
            code = tl.load(codes + tile * half + place, mask, other=0)
        else:
            place += column // 32 * half
            code = tl.load(codes + tile * (2 * half) + place, mask, other=0)
        group = at // GROUP * wide + place_of_row(row)
        s = tl.load(scales + group, mask, other=0.0)
        least = tl.load(minima + group, mask, other=0.0) if MINIMUM else s
        step, least = factors(s, least, KIND, MINIMUM)
        y = value(code, step, least, table, KIND, MINIMUM, False)
        if nibbles:
            high = value(code, step, least, table, KIND, MINIMUM, True)
            y = tl.where(column < 32, y, high)
    tl.store(out + t * out_row + at, y.to(tl.float32) * scale, mask)


@triton.jit
def _give(
    given, row, out, width, first, given_row, out_row, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    follow()
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(row + t).to(tl.int64)
    mask = (at < width) & (source >= 0)
    y = tl.load(given + source * given_row + first + at, mask, other=0.0)
    place = out + t * out_row + at
    if ADD:
        y = tl.load(place, mask, other=0.0) + y
    tl.store(place, y, mask)


@triton.jit
def _select(x, index, out, act, width, x_row, out_row, act_row, BLOCK: tl.constexpr):
    follow()
    s = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    y = tl.load(x + tl.load(index + s).to(tl.int64) * x_row + at, mask, other=0.0)
    if out is not None:
        tl.store(out + s * out_row + at, y, mask)
    if act is not None:
        tl.store(act + s * act_row + at, y.to(tl.bfloat16), mask)


def embed(table, index, out, *, scale, offset):
    """out[t] = table[index[t] + offset] * scale."""
    tokens, width = out.shape
    _embed[(tokens, triton.cdiv(width, BLOCK))](
        table.codes, table.scales, table.minima, table.table, index, out, table.n, width,
        up(table.n), up(table.k) // TILE, table.codes.stride(0), out.stride(0), float(scale),
        offset, KIND=table.kind, GROUP=table.group, MINIMUM=table.minima is not None, TILE=TILE,
        BLOCK=BLOCK, **FOLLOWING,
    )  # fmt: skip


def give(given, row, out, *, first, add):
    """out[t] = columns of given[row[t]], or added to it; rows with -1 stay."""
    tokens, width = out.shape
    _give[(tokens, triton.cdiv(width, BLOCK))](
        given, row, out, width, first, given.stride(0), out.stride(0), ADD=add, BLOCK=BLOCK,
        **FOLLOWING,
    )  # fmt: skip


def select(x, index, out, act):
    """out, act = x[index]."""
    width = x.shape[1]
    _select[(index.shape[0], triton.cdiv(width, BLOCK))](
        x, index, out, act, width, x.stride(0), stride(out), stride(act), BLOCK=BLOCK, **FOLLOWING,
    )  # fmt: skip
