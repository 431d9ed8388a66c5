"""Finds the longest computed prefix of a prompt, to the token.

A trie whose edges are the tokens of one block: children are compared by their tokens, not by a
hash of them, so two prompts can never be confused. The index holds one reference to each block
it knows; blocks nobody else holds are given back least recently used first, leaves before parents.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from octavo.backends.base import BLOCK
from octavo.engine.blocks import BlockPool

CANDIDATES = 64  # children looked at for a partial match

Tokens = tuple[int, ...]


class Match(NamedTuple):
    """Whole blocks to share, and possibly one more whose first `partial` tokens can be copied."""

    blocks: list[int]
    partial_block: int | None
    partial: int

    @property
    def tokens(self) -> int:
        return len(self.blocks) * BLOCK + self.partial


@dataclass(eq=False, slots=True)
class _Node:
    tokens: Tokens
    block: int
    parent: _Node | None
    children: dict[Tokens, _Node] = field(default_factory=dict)
    by_first: dict[int, list[_Node]] = field(default_factory=dict)
    used: int = 0


def _common(a: Tokens, b: Sequence[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


class PrefixIndex:
    """The computed prefixes of a BlockPool, one trie per salt."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._roots: dict[str, _Node] = {}
        self._node_of: dict[int, _Node] = {}
        self._heap: list[tuple[int, int, _Node]] = []  # (used, tie, node), lazily cleaned
        self._clock = count(1)
        self._ties = count()

    @property
    def capacity(self) -> int:
        """Blocks of the pool."""
        return self._pool.count

    def __len__(self) -> int:
        """Blocks the index refers to."""
        return len(self._node_of)

    def match(self, tokens: Sequence[int], salt: str) -> Match:
        """The longest known prefix of `tokens`. Takes a reference to every block it returns."""
        node, blocks = self._roots.get(salt), []
        at = 0
        while node is not None and at + BLOCK <= len(tokens):
            child = node.children.get(tuple(tokens[at : at + BLOCK]))
            if child is None:
                break
            self._use(child)
            blocks.append(child.block)
            node, at = child, at + BLOCK
        best, length = None, 0
        if node is not None and at < len(tokens):
            rest = tokens[at : at + BLOCK]
            for child in node.by_first.get(rest[0], ())[-CANDIDATES:]:
                if (n := _common(child.tokens, rest)) > length:
                    best, length = child, n
        if best is not None:
            self._use(best)
            blocks.append(best.block)
        for block in blocks:
            self._pool.share(block)
        if best is None:
            return Match(blocks, None, 0)
        return Match(blocks[:-1], best.block, length)

    def insert(self, tokens: Sequence[int], blocks: list[int], salt: str) -> None:
        """Records that `blocks` hold the keys and values of `tokens` (the last may be partly full).

        Where an equal block is known already, the entry of `blocks` is replaced by that one: equal
        tokens at equal positions have equal keys and values, bit for bit.
        """
        node = self._roots.setdefault(salt, _Node((), -1, None))
        for i, block in enumerate(blocks):
            part = tuple(tokens[i * BLOCK : (i + 1) * BLOCK])
            child = node.children.get(part)
            if child is None:
                if block in self._node_of:  # a partly filled entry that has grown since
                    self._remove(self._node_of[block])
                child = _Node(part, block, node)
                node.children[part] = child
                node.by_first.setdefault(part[0], []).append(child)
                self._node_of[block] = child
                self._pool.share(block)
            elif child.block != block and len(part) == BLOCK:
                self._pool.share(child.block)
                self.release(block)
                blocks[i] = child.block
            self._use(child)
            if len(part) < BLOCK:
                break
            node = child

    def share(self, block: int) -> None:
        """Adds a reference to a block that somebody holds."""
        self._pool.share(block)

    def release(self, block: int) -> None:
        """Drops a reference somebody held; a block only the index holds becomes evictable."""
        if self._pool.free(block) == 1 and (node := self._node_of.get(block)):
            self._use(node)
            self._push(node)

    def allocate(self) -> int | None:
        """A block: a free one, else the least recently used that nobody holds, else None."""
        while (block := self._pool.allocate()) is None:
            if not self.evict():
                return None
        return block

    def evict(self) -> bool:
        """Forgets the least recently used leaf that nobody holds."""
        while self._heap:
            used, _, node = heapq.heappop(self._heap)
            if self._node_of.get(node.block) is not node or node.children:
                continue  # gone, or its children must go first and will push it again
            if self._pool.references(node.block) != 1:
                continue  # in use: pushed again when released
            if used != node.used:
                self._push(node)
                continue
            self._remove(node)
            return True
        return False

    def clear(self) -> None:
        """Forgets everything that nobody holds."""
        while self.evict():
            pass

    def _use(self, node: _Node) -> None:
        node.used = next(self._clock)

    def _push(self, node: _Node) -> None:
        heapq.heappush(self._heap, (node.used, next(self._ties), node))

    def _remove(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None and not node.children
        del parent.children[node.tokens]
        siblings = parent.by_first[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del parent.by_first[node.tokens[0]]
        del self._node_of[node.block]
        self._pool.free(node.block)
        known = parent.block >= 0 and not parent.children
        if known and self._pool.references(parent.block) == 1:
            self._push(parent)
