"""Finds the longest computed prefix of a prompt, to the token.

A trie whose edges are the tokens of one block: children are compared by their tokens, not by a
hash of them, so two prompts can never be confused. The index holds one reference to each block it
knows. Blocks without other references are evicted least recently used first, leaves before parents.

Those blocks are kept in the order in which they were freed. Who holds a block holds its ancestors
too and frees them after it, so the first in that order never has children: sharing, freeing and
evicting a block take constant time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from octavo.backends.base import BLOCK
from octavo.balance.chain import link
from octavo.engine.block_changes import BlockChanges, PromptBlocks, salt_root
from octavo.engine.blocks import BlockAllocator

CANDIDATES = 64  # children looked at for a partial match

Tokens = tuple[int, ...]


class Match(NamedTuple):
    """Blocks to share, and perhaps one whose first `partial` tokens match and are copied."""

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
    salt: str = ""  # of a root
    number: int = 0  # of the chain up to here, if the block is full
    depth: int = 0  # blocks up to here
    prompt: PromptBlocks | None = None  # that it came with
    children: dict[Tokens, _Node] = field(default_factory=dict)
    by_first: dict[int, dict[Tokens, _Node]] = field(default_factory=dict)


def _common(a: Tokens, b: Sequence[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


class PrefixIndex:
    """The computed prefixes in the KV cache, one trie per salt. changes: where whole blocks that
    come and go are noted."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._roots: dict[str, _Node] = {}
        self._node_of: dict[int, _Node] = {}
        self._idle: OrderedDict[int, _Node] = OrderedDict()  # by block; freed first comes first
        self.changes: BlockChanges | None = None

    def prompt(self, name: str, tokens: int) -> PromptBlocks | None:
        """What is told of a prompt's blocks; None: nobody wants to know."""
        return self.changes.prompt(name, tokens) if self.changes is not None and name else None

    @property
    def capacity(self) -> int:
        """Blocks of the KV cache."""
        return self._allocator.count

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free ones and evictable ones."""
        return self._allocator.free_count + len(self._idle)

    def __len__(self) -> int:
        """Blocks that the index knows."""
        return len(self._node_of)

    @property
    def salts(self) -> int:
        """Salts with known prefixes."""
        return len(self._roots)

    def match(self, tokens: Sequence[int], salt: str) -> Match:
        """The longest known prefix of `tokens`. Takes a reference to every block it returns."""
        node, blocks = self._roots.get(salt), []
        at = 0
        while node is not None and at + BLOCK <= len(tokens):
            child = node.children.get(tuple(tokens[at : at + BLOCK]))
            if child is None:
                break
            blocks.append(child.block)
            node, at = child, at + BLOCK
        best, length = None, 0
        if node is not None and at < len(tokens):
            rest = tokens[at : at + BLOCK]
            alike = node.by_first.get(rest[0], {})
            for child in islice(reversed(alike.values()), CANDIDATES):
                if (n := _common(child.tokens, rest)) > length:
                    best, length = child, n
        if best is not None:
            blocks.append(best.block)
        for block in blocks:
            self.share(block)
        if best is None:
            return Match(blocks, None, 0)
        return Match(blocks[:-1], best.block, length)

    def insert(
        self, tokens: Sequence[int], blocks: list[int], salt: str, count: int, known: int = 0,
        prompt: PromptBlocks | None = None,
    ) -> None:  # fmt: skip
        """Records that `blocks` hold the keys and values of the first `count` of `tokens`.

        The last of those blocks may be partly full. known: leading blocks that are in the index.
        prompt: which `tokens` begin with, if what becomes of its blocks is to be told.
        Where an equal block is known already, the entry of `blocks` is replaced by that one: equal
        tokens at equal positions have equal keys and values, bit for bit.
        """
        if known:
            node = self._node_of[blocks[known - 1]]
        else:
            node = self._root(salt)
        for i in range(known, -(-count // BLOCK)):
            block, edge = blocks[i], tuple(tokens[i * BLOCK : min((i + 1) * BLOCK, count)])
            child = node.children.get(edge)
            if child is None:
                if block in self._node_of:  # known as partly filled; it has more tokens now
                    self._remove(self._node_of[block])
                child = _Node(edge, block, node, depth=i + 1)
                if len(edge) == BLOCK:
                    child.number = link(node.number, edge)
                    if prompt is not None and child.depth * BLOCK <= prompt.tokens:
                        child.prompt = prompt
                    if self.changes is not None:
                        self.changes.store(child.number, child.prompt, child.depth)
                node.children[edge] = child
                node.by_first.setdefault(edge[0], {})[edge] = child
                self._node_of[block] = child
                self.share(block)
            elif child.block != block and len(edge) == BLOCK:
                self.share(child.block)
                self.free([block])
                blocks[i] = child.block
            if len(edge) < BLOCK:
                break
            node = child

    def _root(self, salt: str) -> _Node:
        if salt not in self._roots:
            self._roots[salt] = _Node((), -1, None, salt, salt_root(salt))
        return self._roots[salt]

    def share(self, block: int) -> None:
        """Adds a reference to a block that has one."""
        self._allocator.share(block)
        self._idle.pop(block, None)

    def free(self, blocks: Sequence[int]) -> None:
        """Drops a reference to each block of a sequence, given in the order of its tokens. Those
        that only the index holds become evictable."""
        for block in reversed(blocks):
            if self._allocator.free(block) == 1 and (node := self._node_of.get(block)):
                self._idle[block] = node

    def allocate(self) -> int | None:
        """A free block, else the least recently used evictable one, else None."""
        while (block := self._allocator.allocate()) is None:
            if not self.evict():
                return None
        return block

    def evict(self) -> bool:
        """Evicts the least recently used block. Returns False if none is evictable."""
        if not self._idle:
            return False
        _, node = self._idle.popitem(last=False)
        self._remove(node)
        root = node.parent
        if root is not None and root.parent is None and not root.children:
            del self._roots[root.salt]
        return True

    def clear(self) -> None:
        """Evicts everything that is evictable."""
        while self.evict():
            pass

    def _remove(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None and not node.children
        del parent.children[node.tokens]
        alike = parent.by_first[node.tokens[0]]
        del alike[node.tokens]
        if not alike:
            del parent.by_first[node.tokens[0]]
        del self._node_of[node.block]
        if self.changes is not None and len(node.tokens) == BLOCK:
            self.changes.remove(node.number, node.prompt, node.depth)
        self._allocator.free(node.block)
