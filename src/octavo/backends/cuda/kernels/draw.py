"""A token drawn from each row of logits: what `native/runtime/sampling.cpp` does, on the device.

Tokens are ordered by logit, the largest first, of equals by number. A place in that order is found
without sorting: the 32 bits of a logit are decided one after the other, each by a sum over what is
above. Sums are of chunks in their order, so they depend on the row alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.backends.cuda.kernels.common import FOLLOWING, follow, stride
from octavo.backends.cuda.kernels.head import peak, row_block, row_logits

LEAST = tl.constexpr(-2147483648)
MOST = tl.constexpr(2147483647)
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _ordered(bits):
    """Bits of a float as an integer that is ordered alike; and back."""
    return bits ^ ((bits >> 31) & MOST)


@triton.jit
def _mass(
    logits, masks, vocabulary, top, inverse, cut, cut_token, least,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The softmax's part, or the number, of tokens up to place (cut, cut_token) with keys of
    `least` or more."""
    total = tl.zeros((1,), tl.float64)
    for at in range(0, vocabulary, BLOCK):
        token, x = row_logits(logits, masks, at, vocabulary, BLOCK)
        key = _ordered(x.to(tl.int32, bitcast=True))
        kept = (key > cut) | ((key == cut) & (token <= cut_token))
        part = tl.exp((x - top) * inverse)
        if COUNT:
            part = (x > float("-inf")).to(tl.float32)
        total += tl.sum(tl.where(kept & (key >= least), part, 0.0), 0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def _reach(
    logits, masks, vocabulary, top, inverse, cut, cut_token, target,
    COUNT: tl.constexpr, STRICT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first place at which what lies up to it reaches `target`, or exceeds it if STRICT; the
    cut's own place if it does not."""
    key = tl.full((1,), -2147483648, tl.int32)
    trial = tl.full((1,), 0, tl.int32)  # the sign first
    for number in range(0, 32):
        mass = _mass(logits, masks, vocabulary, top, inverse, cut, cut_token, trial, COUNT, BLOCK)
        key = tl.where(mass > target if STRICT else mass >= target, trial, key)
        trial = key + (1 << tl.maximum(30 - number, 0))
    key = tl.max(key, 0)
    above = _mass(
        logits, masks, vocabulary, top, inverse, cut, cut_token, key + 1, COUNT, BLOCK
    )  # fmt: skip
    each = 1.0 if COUNT else tl.exp((_ordered(key).to(tl.float32, bitcast=True) - top) * inverse)
    parts = (target - above) / each
    wanted = tl.maximum(1.0, tl.floor(parts) + 1.0 if STRICT else tl.ceil(parts))
    seen, place = tl.zeros((1,), tl.float64), tl.full((1,), -1, tl.int32)
    for at in range(0, vocabulary, BLOCK):  # of equals: the last that is wanted
        token, x = row_logits(logits, masks, at, vocabulary, BLOCK)
        same = (_ordered(x.to(tl.int32, bitcast=True)) == key) & (
            (key > cut) | (token <= cut_token)
        )
        rank = seen + tl.cumsum(same.to(tl.int32), 0).to(tl.float64)
        place = tl.maximum(place, tl.max(tl.where(same & (rank <= wanted), token, -1), 0))
        seen += tl.sum(same.to(tl.int32), 0).to(tl.float64)
    reached = key > LEAST
    return tl.where(reached, key, cut), tl.where(reached, tl.max(place, 0), cut_token)


@triton.jit
def _in_order(logits, masks, vocabulary, top, inverse, u, BLOCK: tl.constexpr):
    """From all tokens, by the inverse of the distribution in order of their numbers."""
    target = u * _mass(logits, masks, vocabulary, top, inverse, LEAST, MOST, LEAST, False, BLOCK)
    before, last = tl.zeros((1,), tl.float64), tl.full((1,), -1, tl.int32)
    drawn = tl.full((1,), 2147483647, tl.int32)
    for at in range(0, vocabulary, BLOCK):
        token, x = row_logits(logits, masks, at, vocabulary, BLOCK)
        part = tl.exp((x - top) * inverse)
        mass = before + tl.cumsum(part.to(tl.float64), 0)
        drawn = tl.minimum(drawn, tl.min(tl.where((part > 0) & (mass > target), token, MOST), 0))
        last = tl.maximum(last, tl.max(tl.where(part > 0, token, -1), 0))
        before += tl.sum(part, 0).to(tl.float64)
    return tl.max(tl.minimum(drawn, last), 0)


@triton.jit
def _uniform(seed, position):
    """53 random bits in [0, 1): Philox-4x32-10 of counter `position` under key `seed`."""
    low = tl.full((1,), 0, tl.uint32) + position.to(tl.uint32)
    high = tl.full((1,), 0, tl.uint32) + (position >> 32).to(tl.uint32)
    a, b, _, _ = tl.philox(seed, low, high, low * 0, low * 0)
    bits = ((a.to(tl.uint64) << 32) | b.to(tl.uint64)) >> 11
    return tl.sum(bits.to(tl.float64), 0) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _draw(
    logits, masks, temperatures, top_ps, min_ps, top_ks, seeds, positions, out, vocabulary,
    logits_row, mask_row, BLOCK: tl.constexpr,
):  # fmt: skip
    follow()
    row = tl.program_id(0)
    logits += row.to(tl.int64) * logits_row
    if masks is not None:
        masks += row.to(tl.int64) * mask_row
    temperature, k = tl.load(temperatures + row), tl.load(top_ks + row)
    top_p, min_p = tl.load(top_ps + row), tl.load(min_ps + row)
    top, token = peak(logits, masks, vocabulary, BLOCK)
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    if (token >= 0) & (temperature > 0) & (inverse <= LARGEST) & (top <= LARGEST):
        u = _uniform(tl.load(seeds + row), tl.load(positions + row))
        best = (k > 0) & (k < vocabulary)
        if (best == 0) & (top_p >= 1) & (min_p <= 0):
            token = _in_order(logits, masks, vocabulary, top, inverse, u, BLOCK)
        else:
            cut, end = token * 0 + LEAST, token * 0 + MOST
            if best:
                cut, end = _reach(
                    logits, masks, vocabulary, top, inverse, cut, end, k.to(tl.float64),
                    True, False, BLOCK,
                )  # fmt: skip
            total = _mass(logits, masks, vocabulary, top, inverse, cut, end, LEAST, False, BLOCK)
            if min_p > 0:
                least = _ordered((top + tl.log(min_p) * temperature).to(tl.int32, bitcast=True))
                end = tl.where(least > cut, MOST, end)
                cut = tl.maximum(cut, least)
            if top_p < 1:
                cut, end = _reach(
                    logits, masks, vocabulary, top, inverse, cut, end, top_p.to(tl.float64) * total,
                    False, False, BLOCK,
                )  # fmt: skip
            total = _mass(logits, masks, vocabulary, top, inverse, cut, end, LEAST, False, BLOCK)
            _, token = _reach(
                logits, masks, vocabulary, top, inverse, cut, end,
                tl.minimum(u * total, total * 0.999999999999), False, True, BLOCK,
            )  # fmt: skip
    tl.store(out + row, token)


def draw(logits, masks, temperature, top_p, min_p, top_k, seed, position, out):
    """A token of each row by its temperature, top-k, min-p and top-p; the likeliest at temperature
    0; -1 where the mask leaves none. seed, position: int64, of a row's random number."""
    rows, vocabulary = logits.shape
    _draw[(rows,)](
        logits, masks, temperature, top_p, min_p, top_k, seed, position, out, vocabulary,
        logits.stride(0), stride(masks), BLOCK=row_block(vocabulary),
        num_warps=8, **FOLLOWING,
    )  # fmt: skip
