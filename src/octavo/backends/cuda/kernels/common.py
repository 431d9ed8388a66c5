"""What kernels share: products that the interpreter can do too, sums of slices, activations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def _hopper() -> bool:
    """Whether kernels are compiled for a GPU of compute capability 9.0 or later."""
    if INTERPRETED.value:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)


HOPPER = tl.constexpr(_hopper())
FOLLOWING = {"launch_pdl": True} if HOPPER.value else {}  # of launches whose kernel calls `follow`


@triton.jit
def follow():
    """Waits until the launch before has ended. Kernels begin with it: with programmatic dependent
    launch (compute capability 9.0) they are started before."""
    if HOPPER:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def dot(a, b, acc):
    """acc + a b. Triton's interpreter multiplies the bits of bf16 numbers, not what they mean."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def summed(x, offset, mask, stride, PARTS: tl.constexpr):
    """The sum of slices that lie `stride` apart, ascending."""
    total = tl.load(x + offset, mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(x + part * stride + offset, mask, other=0.0)
    return total


@triton.jit
def tanh(x):
    """By one exponential that cannot overflow; off by 1e-7 at most."""
    e = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, KIND: tl.constexpr):
    """An activation of `octavo.program.ops.Activation`, but for gated ones."""
    if KIND == "silu":
        return x * sigmoid(x)
    elif KIND == "tanh":
        return tanh(x)
    elif KIND == "relu":
        return tl.maximum(x, 0.0)
    elif KIND == "quick_gelu":
        return x * sigmoid(1.702 * x)
    elif KIND == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(KIND == "gelu")
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gated(gate, up, KIND: tl.constexpr):
    """activation(gate) * up."""
    if KIND == "swiglu_clamped":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate * sigmoid(1.702 * gate) * (up + 1.0)
    else:
        return activate(gate, KIND) * up


def stride(x, dim=0):
    """Of a tensor that may be missing, or have one row."""
    return 0 if x is None else x.stride(dim)


def row_warps(width):
    """Warps that sum a row: they set the order, so the width alone decides."""
    return min(16, max(1, triton.next_power_of_2(width) // 256))
