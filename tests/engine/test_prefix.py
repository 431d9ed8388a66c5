"""The prefix index against the plain definition, and the pool's accounts."""

from __future__ import annotations

import random
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends.base import BLOCK
from octavo.client.cached_prompts import CachedPrompts
from octavo.engine.block_changes import BlockChanges, CachedPrompt
from octavo.engine.blocks import BlockAllocator
from octavo.engine.kv import KVCache, KVState
from octavo.engine.prefix import Match, PrefixIndex

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
        index.free([match.partial_block])
    if ok:
        index.insert(sequence, blocks, salt, len(sequence))
    index.free(blocks)
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
    pool = BlockAllocator(200)
    index = PrefixIndex(pool)
    for sequence in stored:
        assert store(index, sequence)
    match = index.match(wanted, "")
    assert match.tokens == longest_common(wanted, stored)
    index.free(match.blocks)
    index.free([] if match.partial_block is None else [match.partial_block])
    assert pool.free_count + len(index) == pool.count  # everything is free or cached


@settings(max_examples=100, deadline=None)
@given(st.lists(tokens, max_size=30), st.integers(6, 20))
def test_a_small_pool_never_leaks(sequences: list[list[int]], count: int) -> None:
    pool = BlockAllocator(count)
    index = PrefixIndex(pool)
    for sequence in sequences:
        assert store(
            index, sequence
        )  # 5 blocks and a partial one always fit once others are evicted
        assert pool.free_count + len(index) == count
    index.clear()
    assert pool.free_count == count and len(index) == 0


def test_salts_are_apart() -> None:
    index = PrefixIndex(BlockAllocator(50))
    store(index, list(range(40)), "a")
    assert index.match(list(range(40)), "b").tokens == 0
    assert index.match(list(range(40)), "a").tokens == 40


def test_least_recently_used_goes_first() -> None:
    pool = BlockAllocator(4)
    index = PrefixIndex(pool)
    a, b, c = [1] * BLOCK, [2] * BLOCK, [3] * BLOCK
    for sequence in (a, b, c):
        store(index, sequence)
    index.free(index.match(a, "").blocks)  # a is used again
    held = [index.allocate(), index.allocate()]  # one free block, then one evicted
    assert None not in held
    assert index.match(b, "").tokens == 0
    assert index.match(a, "").tokens == BLOCK


def test_blocks_in_use_are_not_evicted() -> None:
    pool = BlockAllocator(2)
    index = PrefixIndex(pool)
    store(index, [1] * BLOCK * 2)
    match = index.match([1] * BLOCK * 2, "")
    assert index.allocate() is None
    index.free(match.blocks)
    assert index.allocate() is not None


class Plain:
    """The index as its definition says it: a list of what is known, looked through every time."""

    def __init__(self, pool: BlockAllocator) -> None:
        self.pool = pool
        self.known: dict[tuple[str, tuple[int, ...]], int] = {}  # of a prefix: its last block
        self.released: dict[int, int] = {}
        self.clock = 0

    def match(self, tokens: list[int], salt: str) -> Match:
        blocks: list[int] = []
        while (at := (len(blocks) + 1) * BLOCK) <= len(tokens):
            if (salt, tuple(tokens[:at])) not in self.known:
                break
            blocks.append(self.known[salt, tuple(tokens[:at])])
        start, partial, best = len(blocks) * BLOCK, None, 0
        for (other, prefix), block in self.known.items():
            inside = other == salt and prefix[:start] == tuple(tokens[:start])
            if inside and start < len(prefix) <= start + BLOCK:
                n = longest_common(tokens[start:], [list(prefix[start:])])
                if n and n >= best:  # of equals the newest
                    partial, best = block, n
        for block in (*blocks, *([] if partial is None else [partial])):
            self.pool.share(block)
        return Match(blocks, partial, best)

    def insert(self, tokens: list[int], blocks: list[int], salt: str) -> None:
        for i, block in enumerate(blocks):
            key = (salt, tuple(tokens[: (i + 1) * BLOCK]))
            if key not in self.known:
                self.known[key] = block
                self.pool.share(block)
            elif self.known[key] != block and len(key[1]) % BLOCK == 0:
                self.pool.share(self.known[key])
                self.pool.free(block)
                blocks[i] = self.known[key]

    def free(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.pool.free(block)
            self.clock += 1
            self.released[block] = self.clock

    def allocate(self) -> int | None:
        while (block := self.pool.allocate()) is None:
            free = [
                (self.released[b], key)
                for key, b in self.known.items()
                if self.pool.references(b) == 1
                and not any(
                    s == key[0] and len(p) > len(key[1]) and p[: len(key[1])] == key[1]
                    for s, p in self.known
                    if len(key[1]) % BLOCK == 0
                )
            ]
            if not free:
                return None
            self.pool.free(self.known.pop(min(free)[1]))
        return block


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(4, 24))
def test_evicts_what_the_definition_evicts(seed: int, count: int) -> None:
    """Sequences begin, fork, and end or are given up in any order; both hand out equal blocks."""
    rng = random.Random(seed)
    both: tuple[PrefixIndex, Plain] = (
        PrefixIndex(BlockAllocator(count)),
        Plain(BlockAllocator(count)),
    )
    running: list[tuple[list[int], str, list[int]]] = []
    for _ in range(60):
        if running and rng.random() < 0.5:
            sequence, salt, blocks = running.pop(rng.randrange(len(running)))
            mine, other = list(blocks), list(blocks)
            if len(blocks) * BLOCK >= len(sequence) and rng.random() < 0.8:
                both[0].insert(sequence, mine, salt, len(sequence))
                both[1].insert(sequence, other, salt)
            assert mine == other
            both[0].free(mine)
            both[1].free(other)
            continue
        sequence = [rng.randrange(2) for _ in range(rng.randrange(1, 4 * BLOCK))]
        sequence = [sequence[i // 4 * 4] for i in range(len(sequence))]  # so that many are alike
        salt = rng.choice(["a", "b"])
        match = both[0].match(sequence[:-1], salt)
        assert both[1].match(sequence[:-1], salt) == match
        blocks = list(match.blocks)
        while len(blocks) * BLOCK < len(sequence):
            block = both[0].allocate()
            assert both[1].allocate() == block
            if block is None:
                break
            blocks.append(block)
        for index in both:
            index.free([] if match.partial_block is None else [match.partial_block])
        running.append((sequence, salt, blocks))
    for index in both:
        for _, _, blocks in running:
            index.free(blocks)
    left = [both[0].allocate() for _ in range(count)]
    assert [both[1].allocate() for _ in range(count)] == left and None not in left
    assert len(both[0]) == 0


def whole_blocks(index: PrefixIndex, tokens: list[int]) -> list[int]:
    """The whole blocks that are known of a prompt; each has one more reference."""
    match = index.match(tokens, "")
    index.free([] if match.partial_block is None else [match.partial_block])
    return match.blocks


def compute(
    index: PrefixIndex, name: str, prompt: list[int], text: list[int], ends: list[int]
) -> None:
    """What a request does, whose `text` begins with its prompt: its blocks are known from one end
    to the next, as far as there are any."""
    blocks = whole_blocks(index, text[:-1])
    known = len(blocks)
    while len(blocks) * BLOCK < len(text) and (block := index.allocate()) is not None:
        blocks.append(block)
    for end in ends:
        if known * BLOCK < end <= len(blocks) * BLOCK:
            index.insert(text, blocks, "", end, known, index.prompt(name, len(prompt)))
            known = end // BLOCK
    index.free(blocks)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(6, 24))
def test_what_is_told_of_prompts_is_what_is_held(seed: int, count: int) -> None:
    """Requests come, some of prompts that others had, end early or go on to texts of their own;
    what is held of older ones is evicted."""
    rng, index = random.Random(seed), PrefixIndex(BlockAllocator(count))
    index.changes = BlockChanges()
    told, prompts = CachedPrompts(), dict[str, list[int]]()
    for number in range(40):
        prompt = [token for token in rng.choices((1, 2), k=4) for _ in range(BLOCK)]
        prompt = prompt[: rng.randrange(1, len(prompt))]
        if prompts and rng.random() < 0.3:
            prompt = rng.choice(list(prompts.values()))
        text = [*prompt, *[100 + number] * rng.randrange(2 * BLOCK)]
        ends = sorted(rng.choices(range(1, len(text) + 1), k=3))
        prompts[str(number)] = prompt
        compute(index, str(number), prompt, text, ends)
        told.take(index.changes.take()[2])
        for one in prompts.values():
            held = whole_blocks(index, one)
            index.free(held)
            shared = (
                min(p.cached, longest_common(one, [prompts[p.name]]) // BLOCK * BLOCK) for p in told
            )
            assert max(shared, default=0) == len(held) * BLOCK
    index.clear()
    told.take(index.changes.take()[2])
    assert not list(told) and index.changes.take() == ([], [], [])


def test_choices_of_a_request_have_one_prompt_between_them() -> None:
    changes = BlockChanges()
    first, second = changes.prompt("a", 40), changes.prompt("a", 40)
    assert first is second and changes.prompt("a", 41) is not first
    changes.store(1, first, 1)
    changes.store(2, second, 2)
    changes.remove(2, second, 2)
    assert changes.take()[2] == [CachedPrompt("a", 40, BLOCK, last=False)]
    changes.remove(1, first, 1)
    assert changes.take()[2] == [CachedPrompt("a", 40, 0, last=True)]
    left = weakref.ref(first)
    del first, second
    assert left() is None, "nobody has it any more"


def test_nothing_is_told_where_nobody_asks() -> None:
    index = PrefixIndex(BlockAllocator(1))
    assert index.prompt("a", 1) is None
    index.changes = BlockChanges()
    assert index.prompt("", 1) is None and index.prompt("a", 1) is not None


def lines_of(call: Callable[[], object]) -> int:
    """Lines of octavo's Python that a call runs; the collector may call others' meanwhile."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line" and "octavo" in frame.f_globals.get("__name__", "")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def test_equal_prompts_leave_no_trace() -> None:
    """The account of what can be evicted has a block once, however often it was let go."""
    index = PrefixIndex(BlockAllocator(100))
    prompt = list(range(64 * BLOCK))
    store(index, prompt)
    tracemalloc.start()
    try:
        for _ in range(1000):
            index.free(index.match(prompt, "").blocks)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 100_000  # less than two bytes a release
    assert lines_of(index.evict) < 30


def test_evicting_costs_the_same_however_much_is_known() -> None:
    """A thousand blocks below one, all with the same first token; and a chain as long."""
    wide, deep = PrefixIndex(BlockAllocator(1100)), PrefixIndex(BlockAllocator(1100))
    for i in range(1000):
        store(wide, [1] * BLOCK + [2, i])
    store(deep, list(range(1000 * BLOCK)))
    few = PrefixIndex(BlockAllocator(10))
    store(few, list(range(2 * BLOCK)))
    once = lines_of(few.evict)
    for index in (wide, deep):
        assert len(index) >= 1000
        assert {lines_of(index.evict) for _ in range(900)} <= {once, once + 1, once - 1}


def test_salts_leave_with_their_last_block() -> None:
    """A salt is a client's word: thousands of them must not stay."""
    index = PrefixIndex(BlockAllocator(8))
    for i in range(1000):
        store(index, [1, 2, 3], f"salt {i}")
    assert len(index) <= 8 and index.salts <= 8
    index.clear()
    assert index.salts == 0


def test_a_copy_that_fails_leaves_no_blocks() -> None:
    """Of a fork, and of an admission that continues within a known block."""

    def fail(source: int, target: int) -> None:
        raise RuntimeError("no such KV block")

    pool = BlockAllocator(20)
    cache = KVCache(PrefixIndex(pool), fail)
    parent = KVState(list(range(40)))
    assert cache.admit(parent, 40, prefix_caching=True)
    cache.advance(parent, 40)
    for _ in range(3):
        child = parent.fork()
        with pytest.raises(RuntimeError):
            cache.fork(parent, child)
        assert (child.blocks, child.computed) == ([], 0)
    cache.finish(parent)
    for _ in range(3):
        again = KVState([*range(36), 99, 99])
        with pytest.raises(RuntimeError):
            cache.admit(again, 38, prefix_caching=True)
        assert (again.blocks, again.computed) == ([], 0)
    cache.index.clear()
    assert pool.free_count == pool.count
