"""The likeliest token of rows of logits."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.backends.cuda.kernels.common import FOLLOWING, follow, stride


@triton.jit
def row_logits(logits, masks, at, vocabulary, BLOCK: tl.constexpr):
    """BLOCK tokens from `at` on and their logits: -inf where there is none, where it is NaN and
    where the token's bit is not set. -0 is 0."""
    token = at + tl.arange(0, BLOCK)
    inside = token < vocabulary
    x = tl.load(logits + token, inside, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))
    if masks is not None:
        byte = tl.load(masks + token // 8, inside, other=0).to(tl.int32)
        x = tl.where((byte >> token % 8 & 1) == 1, x, float("-inf"))
    return token, tl.where(x == 0, 0.0, x)


@triton.jit
def peak(logits, masks, vocabulary, BLOCK: tl.constexpr):
    """The largest logit, and the first token that has it; -1 if none may be drawn."""
    best, found = tl.full((1,), float("-inf"), tl.float32), tl.full((1,), -1, tl.int32)
    for at in range(0, vocabulary, BLOCK):
        token, x = row_logits(logits, masks, at, vocabulary, BLOCK)
        top = tl.max(x, 0)
        first = tl.min(tl.where(x == top, token, 2147483647), 0)
        found = tl.where(top > best, first, found)
        best = tl.maximum(best, top)
    return tl.max(best, 0), tl.max(found, 0)


@triton.jit
def _argmax(logits, masks, out, vocabulary, logits_row, mask_row, BLOCK: tl.constexpr):
    follow()
    row = tl.program_id(0).to(tl.int64)
    if masks is not None:
        masks += row * mask_row
    _, token = peak(logits + row * logits_row, masks, vocabulary, BLOCK)
    tl.store(out + row, token)


def row_block(vocabulary):
    """Logits that are read together."""
    return min(8192, triton.next_power_of_2(vocabulary))


def argmax(logits, masks, out):
    """The first of the largest logits that the mask leaves; -1 if it leaves none."""
    rows, vocabulary = logits.shape
    _argmax[(rows,)](
        logits, masks, out, vocabulary, logits.stride(0), stride(masks),
        BLOCK=row_block(vocabulary), num_warps=16, **FOLLOWING,
    )  # fmt: skip
