"""The prefix index against the plain definition, and the pool's accounts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends.base import BLOCK
from octavo.engine.blocks import BlockPool
from octavo.engine.prefix import PrefixIndex

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=5 * BLOCK)


def store(index: PrefixIndex, sequence: list[int], salt: str = "") -> bool:
    """What a finished sequence does: match, compute the rest, insert, release."""
    match = index.match(sequence[:-1], salt)
    blocks = list(match.blocks)
    ok = True
    while len(blocks) * BLOCK < len(sequence):
        block = index.allocate()
        if block is None:
            ok = False
            break
        blocks.append(block)
    if match.partial_block is not None:
        index.release(match.partial_block)
    if ok:
        index.insert(sequence, blocks, salt)
    for block in blocks:
        index.release(block)
    return ok


def longest_common(sequence: list[int], stored: list[list[int]]) -> int:
    best = 0
    for other in stored:
        n = 0
        while n < min(len(sequence), len(other)) and sequence[n] == other[n]:
            n += 1
        best = max(best, n)
    return best


@settings(max_examples=200, deadline=None)
@given(st.lists(tokens, max_size=8), tokens)
def test_finds_the_longest_prefix_to_the_token(stored: list[list[int]], wanted: list[int]) -> None:
    pool = BlockPool(200)
    index = PrefixIndex(pool)
    for sequence in stored:
        assert store(index, sequence)
    match = index.match(wanted, "")
    assert match.tokens == longest_common(wanted, stored)
    for block in (*match.blocks, *([] if match.partial_block is None else [match.partial_block])):
        index.release(block)
    assert pool.free_count + len(index) == pool.count  # everything is free or cached


@settings(max_examples=100, deadline=None)
@given(st.lists(tokens, max_size=30), st.integers(6, 20))
def test_a_small_pool_never_leaks(sequences: list[list[int]], count: int) -> None:
    pool = BlockPool(count)
    index = PrefixIndex(pool)
    for sequence in sequences:
        assert store(
            index, sequence
        )  # 5 blocks and a partial one always fit once others are evicted
        assert pool.free_count + len(index) == count
    index.clear()
    assert pool.free_count == count and len(index) == 0


def test_salts_are_apart() -> None:
    index = PrefixIndex(BlockPool(50))
    store(index, list(range(40)), "a")
    assert index.match(list(range(40)), "b").tokens == 0
    assert index.match(list(range(40)), "a").tokens == 40


def test_least_recently_used_goes_first() -> None:
    pool = BlockPool(4)
    index = PrefixIndex(pool)
    a, b, c = [1] * BLOCK, [2] * BLOCK, [3] * BLOCK
    for sequence in (a, b, c):
        store(index, sequence)
    for block in index.match(a, "").blocks:  # a is used again
        index.release(block)
    held = [index.allocate(), index.allocate()]  # one free block, then one evicted
    assert None not in held
    assert index.match(b, "").tokens == 0
    assert index.match(a, "").tokens == BLOCK


def test_blocks_in_use_are_not_evicted() -> None:
    pool = BlockPool(2)
    index = PrefixIndex(pool)
    store(index, [1] * BLOCK * 2)
    match = index.match([1] * BLOCK * 2, "")
    assert index.allocate() is None
    for block in match.blocks:
        index.release(block)
    assert index.allocate() is not None
