"""Sets of tokens as bit masks: one bit per token of the vocabulary, 32 in each word."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.uint32]


def words_for(vocabulary: int) -> int:
    """Words of a mask over `vocabulary` tokens."""
    return (vocabulary + 31) // 32


def mask_of(tokens: Collection[int], words: int) -> Mask:
    """The mask of exactly these tokens."""
    bits = np.zeros(words * 32, bool)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def tokens_of(mask: Mask) -> list[int]:
    """The tokens of a mask, ascending. Meant for masks of few tokens."""
    words = np.flatnonzero(mask)
    bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(len(words), 32)
    rows, columns = np.nonzero(bits)
    return [int(i) for i in words[rows] * 32 + columns]


def count(mask: Mask) -> int:
    """Number of tokens in a mask."""
    return int(np.bitwise_count(mask).sum())


def contains(mask: Mask, token: int) -> bool:
    """True if `token` is in the mask."""
    return bool(mask[token >> 5] >> np.uint32(token & 31) & 1)


def contains_any(mask: Mask, tokens: npt.NDArray[np.int64]) -> bool:
    """True if any of `tokens` is in the mask."""
    return bool((mask[tokens >> 5] >> (tokens & 31).astype(np.uint32) & 1).any())


def without(mask: Mask, tokens: Collection[int]) -> Mask:
    """A copy of the mask without these tokens."""
    return mask & ~mask_of(tokens, len(mask))
