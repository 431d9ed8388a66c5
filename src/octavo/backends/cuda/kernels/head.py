"""The next token of rows of logits."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.backends.cuda.kernels.common import stride


@triton.jit
def allowed(masks, row, mask_row, token, inside):
    """Whether the bit of each token is set."""
    byte = tl.load(masks + row * mask_row + token // 8, inside, other=0).to(tl.int32)
    return (byte >> token % 8 & 1) == 1


@triton.jit
def _argmax(logits, masks, out, vocabulary, logits_row, mask_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best, found = float("-inf"), -1
    for at in range(0, vocabulary, BLOCK):
        token = at + tl.arange(0, BLOCK)
        inside = token < vocabulary
        x = tl.load(logits + row * logits_row + token, inside, other=float("-inf"))
        x = tl.where(x == x, x, float("-inf"))
        if masks is not None:
            x = tl.where(allowed(masks, row, mask_row, token, inside), x, float("-inf"))
        top = tl.max(x, 0)
        first = tl.min(tl.where(x == top, token, 2147483647), 0)
        found = tl.where(top > best, first, found)
        best = tl.maximum(best, top)
    tl.store(out + row, found)


def argmax(logits, masks, out):
    """The first of the largest logits that the mask leaves; -1 if it leaves none."""
    rows, vocabulary = logits.shape
    _argmax[(rows,)](
        logits, masks, out, vocabulary, logits.stride(0), stride(masks),
        BLOCK=min(8192, triton.next_power_of_2(vocabulary)), num_warps=8,
    )  # fmt: skip
