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
    code, scale = code.to(tl.int32), scale.to(tl.float32)
    if KIND == "table4":
        y = scale * tl.load(table + code)
    elif KIND == "fp8":
        y = scale * _e4m3(code)
    elif MINIMUM:
        y = tl.fma(scale, code.to(tl.float32), minimum.to(tl.float32))
    else:
        y = scale * (code - (8 if KIND == "int4" else 128)).to(tl.float32)
    return y.to(tl.bfloat16)


@triton.jit
def of_groups(vectors, rows, column, wide, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Scales or minima of columns [column, column + WIDTH) as they are stored, for groups `wide`
    apart. WIDTH is 32: a group holds all of them, or is 16 columns."""
    if GROUP == 16:
        at = (column + tl.arange(0, WIDTH)) // GROUP
        return tl.load(vectors + at[None, :] * wide + rows[:, None])
    else:
        return tl.load(vectors + (column // GROUP * wide + rows)[:, None])
