"""Weights as bf16 in registers: codes of 8 or 4 bits, scaled in fp32 and rounded once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _e4m3(code):
    """Eight-bit floats with four bits of exponent, by moving their bits; 0x7f is 480."""
    bits = (code & 128) << 24 | (code & 127) << 20
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def value(code, scale, minimum, table, KIND: tl.constexpr, MINIMUM: tl.constexpr):
    """The bf16 values of codes."""
    code = code.to(tl.int32)
    if KIND == "table4":
        y = scale * tl.load(table + code)
    elif KIND == "fp8":
        y = scale * _e4m3(code)
    elif MINIMUM:
        y = tl.fma(scale, code.to(tl.float32), minimum)
    else:
        y = scale * (code - (8 if KIND == "int4" else 128)).to(tl.float32)
    return y.to(tl.bfloat16)


@triton.jit
def scaled(
    code, scales, minima, table, rows, column, wide,
    KIND: tl.constexpr, MINIMUM: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The bf16 values of codes `[rows, WIDTH]` from `column` on, whose groups are apart by `wide`.
    WIDTH is 32: a group is 16 columns, or holds all of them."""
    if GROUP == 16:
        at = (column + tl.arange(0, WIDTH)) // GROUP
        places = at[None, :] * wide + rows[:, None]
    else:
        places = (column // GROUP * wide + rows)[:, None]
    scale = tl.load(scales + places).to(tl.float32)
    minimum = tl.load(minima + places).to(tl.float32) if MINIMUM else scale
    return value(code, scale, minimum, table, KIND, MINIMUM)
