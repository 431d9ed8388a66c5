"""Token masks against sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine import bitmask


@settings(deadline=None)
@given(st.sets(st.integers(0, 99)), st.sets(st.integers(0, 99)))
def test_masks_are_sets(tokens: set[int], others: set[int]) -> None:
    mask = bitmask.mask_of(tokens, bitmask.words_for(100))
    assert len(mask) == 4 and bitmask.count(mask) == len(tokens)
    assert [t for t in range(100) if bitmask.contains(mask, t)] == sorted(tokens)
    assert bitmask.contains_any(mask, np.array(sorted(others), np.int64)) == bool(tokens & others)
    assert bitmask.tokens_of(bitmask.without(mask, others)) == sorted(tokens - others)
    assert bitmask.tokens_of(mask) == sorted(tokens)
