"""Weights as bf16 in registers: codes of 8 or 4 bits, scaled in fp32 and rounded once.

A byte becomes a float by putting its bits into the mantissa of one: conversions of whole numbers
run at a quarter of the rate of other instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.backends.cuda.constants import TILE, up
from octavo.backends.cuda.kernels.common import INTERPRETED

# Four codes of a register each: 1 + code / 128 of low and of high halves, 2^23 + code of bytes.
_LOW = tl.constexpr("""{ .reg .b32 w;
lop3.b32 w, $4, 0x0F0F0F0F, 0x80808080, 0xEA;
prmt.b32 $0, w, 0x3F000000, 0x7044; prmt.b32 $1, w, 0x3F000000, 0x7144;
prmt.b32 $2, w, 0x3F000000, 0x7244; prmt.b32 $3, w, 0x3F000000, 0x7344; }""")
_HIGH = tl.constexpr("""{ .reg .b32 w;
shr.u32 w, $4, 4; lop3.b32 w, w, 0x0F0F0F0F, 0x80808080, 0xEA;
prmt.b32 $0, w, 0x3F000000, 0x7044; prmt.b32 $1, w, 0x3F000000, 0x7144;
prmt.b32 $2, w, 0x3F000000, 0x7244; prmt.b32 $3, w, 0x3F000000, 0x7344; }""")
_BYTE = tl.constexpr("""prmt.b32 $0, $4, 0x4B000000, 0x7440;
prmt.b32 $1, $4, 0x4B000000, 0x7441; prmt.b32 $2, $4, 0x4B000000, 0x7442;
prmt.b32 $3, $4, 0x4B000000, 0x7443;""")
# The bits that `_e4m3` makes of a code where there is no assembly.
_FP8 = tl.constexpr("""{ .reg .b32 a, b, c, d;
prmt.b32 a, $4, 0, 0x0444; prmt.b32 b, $4, 0, 0x1444;
prmt.b32 c, $4, 0, 0x2444; prmt.b32 d, $4, 0, 0x3444;
shr.s32 a, a, 4; shr.s32 b, b, 4; shr.s32 c, c, 4; shr.s32 d, d, 4;
and.b32 $0, a, 0x87F00000; and.b32 $1, b, 0x87F00000;
and.b32 $2, c, 0x87F00000; and.b32 $3, d, 0x87F00000; }""")


def _looked_up(shift: int) -> str:
    """Sixteen codes' values: a lane holds one of the table, and gives it to those that ask."""
    words = [
        f"shr.u32 i, ${16 + j // 4}, {j % 4 * 8 + shift}; shfl.sync.idx.b32 ${j}, v, i, 0x101F, -1;"
        for j in range(16)
    ]
    return "\n".join([
        "{ .reg .b32 i, v; .reg .b64 p; mov.u32 i, %laneid; and.b32 i, i, 15;",
        "mad.wide.u32 p, i, 4, $20; ld.global.nc.b32 v, [p];", *words, "}",
    ])  # fmt: skip


_TABLE_LOW, _TABLE_HIGH = tl.constexpr(_looked_up(0)), tl.constexpr(_looked_up(4))
_TABLE_ARGS = tl.constexpr(",".join(["=r"] * 16 + ["r"] * 4 + ["l"] * 16))


@triton.jit
def _floats(bytes, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r", [bytes], dtype=tl.float32, is_pure=True, pack=4
    )


@triton.jit
def _one_and(bytes, HIGH: tl.constexpr):
    """1 + code / 128 of the low or the high four bits."""
    if INTERPRETED:
        return 1.0 + (bytes >> 4 if HIGH else bytes & 15).to(tl.float32) / 128.0
    elif HIGH:
        return _floats(bytes, _HIGH)
    else:
        return _floats(bytes, _LOW)


@triton.jit
def _whole(bytes, ZERO: tl.constexpr):
    """Bytes, less `zero`, as floats."""
    if INTERPRETED:
        return bytes.to(tl.float32) - ZERO
    else:
        return _floats(bytes, _BYTE) - (8388608.0 + ZERO)


@triton.jit
def _e4m3(bytes):
    """Eight-bit floats with four bits of exponent, by moving their bits; 0x7f is 480."""
    if INTERPRETED:
        code = bytes.to(tl.int32)
        bits = ((code & 128) << 24 | (code & 127) << 20).to(tl.float32, bitcast=True)
    else:
        bits = _floats(bytes, _FP8)
    return bits * 1.329227995784916e36  # 2^120


@triton.jit
def _entry(bytes, table, HIGH: tl.constexpr):
    """What the table has for the low or the high four bits."""
    if INTERPRETED:
        return tl.load(table + (bytes >> 4 if HIGH else bytes & 15).to(tl.int32))
    else:
        ASM: tl.constexpr = _TABLE_HIGH if HIGH else _TABLE_LOW
        return tl.inline_asm_elementwise(
            ASM, _TABLE_ARGS, [bytes, table.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=16
        )


@triton.jit
def _fma(a, b, c):
    """a b + c, rounded once: an interpreter has no such operation."""
    if INTERPRETED:
        return (a.to(tl.float64) * b + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def factors(scale, minimum, KIND: tl.constexpr, MINIMUM: tl.constexpr):
    """(step, offset) of a group by its scale and minimum: what `value` multiplies with, adds."""
    scale = scale.to(tl.float32)
    if KIND == "int4":
        if MINIMUM:
            return 128.0 * scale, _fma(scale, -128.0, minimum.to(tl.float32))
        else:
            return 128.0 * scale, -136.0 * scale
    else:
        return scale, minimum.to(tl.float32)


@triton.jit
def value(
    bytes, step, offset, table, KIND: tl.constexpr, MINIMUM: tl.constexpr, HIGH: tl.constexpr
):
    """The bf16 values of codes; HIGH: those in the high halves of bytes."""
    if KIND == "table4":
        y = step * _entry(bytes, table, HIGH)
    elif KIND == "fp8":
        y = step * _e4m3(bytes)
    elif KIND == "int4":
        y = _fma(_one_and(bytes, HIGH), step, offset)
    elif MINIMUM:
        y = _fma(_whole(bytes, 0.0), step, offset)
    else:
        y = _whole(bytes, 128.0) * step
    return y.to(tl.bfloat16)


@triton.jit
def _of_rows(stored):
    """Rows in order: stored are 0, 8, 1, 9, ... of each 16, for a thread has two."""
    rows: tl.constexpr = stored.shape[0]
    return stored.reshape(rows // 16, 8, 2).permute(0, 2, 1).reshape(rows)


@triton.jit
def of_groups(vectors, rows, column, wide, GROUP: tl.constexpr):
    """Scales or minima of columns [column, column + 32) as they are stored, for groups `wide`
    apart: `[rows, 1]`, or `[rows, 2]` of groups of 16."""
    at = vectors + column // GROUP * wide
    if GROUP == 16:
        return tl.join(_of_rows(tl.load(at + rows)), _of_rows(tl.load(at + wide + rows)))
    else:
        return _of_rows(tl.load(at + rows))[:, None]


@triton.jit
def _half(
    bytes, scales, minima, table, rows, column, wide, KIND: tl.constexpr, GROUP: tl.constexpr,
    MINIMUM: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """The bf16 values of 32 columns from `column` on, whose codes are `[rows, 32]`."""
    scale = of_groups(scales, rows, column, wide, GROUP)
    least = scale
    if MINIMUM:
        least = of_groups(minima, rows, column, wide, GROUP)
    step, offset = factors(scale, least, KIND, MINIMUM)
    groups: tl.constexpr = scale.shape[1]
    count: tl.constexpr = bytes.shape[0]
    apart = bytes.reshape(count, groups, 32 // groups)
    y = value(apart, step[:, :, None], offset[:, :, None], table, KIND, MINIMUM, HIGH)
    return y.reshape(count, 32)


@triton.jit
def _halves(
    low, high, scales, minima, table, rows, column, wide, KIND: tl.constexpr, GROUP: tl.constexpr,
    MINIMUM: tl.constexpr, NIBBLES: tl.constexpr,
):  # fmt: skip
    """The values of a tile from `column` on, `[rows, 32, half]`."""
    then = column + (32 if GROUP < 64 else 0)  # or both halves have the same scale
    return tl.join(
        _half(low, scales, minima, table, rows, column, wide, KIND, GROUP, MINIMUM, False),
        _half(high, scales, minima, table, rows, then, wide, KIND, GROUP, MINIMUM, NIBBLES),
    )


@triton.jit
def lines(w, row, wide, depth, KIND: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr):
    """Where the codes of the first tiles of rows from `row` on lie: `[4 BN, 16]`, 16 bytes of a
    thread and 16 more."""
    BYTES: tl.constexpr = TILE * TILE // 2 if KIND == "int4" or KIND == "table4" else TILE * TILE
    part = tl.arange(0, 4 * BN)
    line = part % (2 * BN)
    block = row // TILE
    if BN > TILE:
        block = tl.minimum(block + line // (2 * TILE), wide // TILE - 1)
    place = block.to(tl.int64) * depth * BYTES + part // (2 * BN) * (TILE * TILE // 2)
    return (w + place + line % (2 * TILE) * 16)[:, None] + tl.arange(0, 16)[None, :]


@triton.jit
def weights(
    codes, scales, minima, table, rows, tile, last, wide, depth,
    KIND: tl.constexpr, GROUP: tl.constexpr, MINIMUM: tl.constexpr, ODD: tl.constexpr,
    BN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The values of a tile of bytes `[BN, 64]`, or of two of nibbles `[BN, 128]`. codes: `lines`.
    ODD: the second one may not be before `last`; its values are any."""
    if KIND == "int4" or KIND == "table4":
        second = None
        if ODD:
            second = (tl.arange(0, 4 * BN) < (last - tile) * (2 * BN))[:, None]
        bytes = tl.load(codes + tile * (TILE * TILE // 2), second)
        bytes0, bytes1 = tl.split(bytes.reshape(2, 2 * BN, 16).permute(1, 2, 0))
        first, other = operand(bytes0, BN), operand(bytes1, BN)
        column, then = tile * TILE, tl.minimum(tile + 1, depth - 1) * TILE
        a = tl.join(
            _halves(
                first, first, scales, minima, table, rows, column, wide, KIND, GROUP, MINIMUM, True
            ),
            _halves(
                other, other, scales, minima, table, rows, then, wide, KIND, GROUP, MINIMUM, True
            ),
        )
        return a.permute(0, 3, 2, 1).reshape(BN, 2 * TILE)
    else:
        bytes = tl.load(codes + tile * (TILE * TILE))
        bytes0, bytes1 = tl.split(bytes.reshape(2, 2 * BN, 16).permute(1, 2, 0))
        a = _halves(
            operand(bytes0, BN), operand(bytes1, BN), scales, minima, table, rows, tile * TILE,
            wide, KIND, GROUP, MINIMUM, False,
        )  # fmt: skip
        return a.permute(0, 2, 1).reshape(BN, TILE)


def odd(k):
    """Whether rows of `k` codes are an odd number of tiles: the last of nibbles has no second."""
    return up(k) // TILE % 2 == 1


@triton.jit
def operand(bytes, ROWS: tl.constexpr):
    """Half a tile as it is stored, `[2 ROWS, 16]`, as `[ROWS, 32]`: threads keep their bytes."""
    apart = bytes.reshape(ROWS // 16, 8, 4, 2, 2, 2, 2)
    return apart.permute(0, 5, 1, 3, 4, 2, 6).reshape(ROWS, 32)


@triton.jit
def place_in_half(row, column):
    """Where half a tile has a row and a column: the same order."""
    line = (row // 16 * 8 + row % 8) * 4 + column % 8 // 2
    return line * 16 + column % 32 // 8 * 4 + row % 16 // 8 * 2 + column % 2


@triton.jit
def place_of_row(row):
    """Where scales have a row."""
    return row // 16 * 16 + row % 8 * 2 + row % 16 // 8
