"""The KV cache as sequences see it: tokens computed so far, and the blocks that hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from octavo.backends.base import BLOCK
from octavo.engine.block_changes import PromptBlocks
from octavo.engine.prefix import Match, PrefixIndex

CopyBlock = Callable[[int, int], None]


def blocks_for(tokens: int) -> int:
    """KV blocks that hold `tokens` tokens."""
    return (tokens + BLOCK - 1) // BLOCK


class ImageRange(NamedTuple):
    """Tokens [start, end), which stand for an image. key: a number below 0 of its content."""

    start: int
    end: int
    key: int


@dataclass(eq=False, slots=True)
class KVState:
    """A sequence's tokens and KV blocks.

    tokens: prompt and generated tokens. computed: how many of them have keys and values in
    `blocks`. indexed: leading blocks that the prefix index knows. cached: prompt tokens found in
    the prefix cache at the first admission, None before. salt: prefixes are shared only between
    sequences of the same salt. images: which tokens stand for images. prompt: what is told of the
    blocks of the prompt, if anything is.
    """

    tokens: list[int]
    salt: str = ""
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    indexed: int = 0
    cached: int | None = None
    images: tuple[ImageRange, ...] = ()
    prompt: PromptBlocks | None = None

    @property
    def keys(self) -> list[int]:
        """The tokens as the prefix index knows them: an image's by the image."""
        if not self.images:
            return self.tokens
        keys = list(self.tokens)
        for image in self.images:
            keys[image.start : image.end] = [image.key] * (image.end - image.start)
        return keys

    @property
    def pending(self) -> int:
        """Tokens that are not computed."""
        return len(self.tokens) - self.computed

    def missing(self, tokens: int) -> int:
        """Blocks to allocate before `tokens` tokens can be computed."""
        return max(0, (tokens + BLOCK - 1) // BLOCK - len(self.blocks))

    def fork(self) -> KVState:
        """A copy that has computed nothing and holds no blocks."""
        return replace(self, tokens=list(self.tokens), computed=0, blocks=[], indexed=0)


class KVCache:
    """Allocates KV blocks for sequences, sharing those of known prefixes."""

    def __init__(
        self, index: PrefixIndex, copy_block: CopyBlock, prefix_caching: bool = True
    ) -> None:
        self.index = index
        self._copy_block = copy_block
        self.prefix_caching = prefix_caching

    @property
    def capacity(self) -> int:
        """Blocks in total."""
        return self.index.capacity

    @property
    def available(self) -> int:
        """Blocks that no sequence holds."""
        return self.index.available

    def fits(self, kv: KVState) -> bool:
        """Whether there are blocks for all tokens, whatever is cached of them."""
        return blocks_for(len(kv.tokens)) <= self.available

    def admit(self, kv: KVState, prompt: int, prefix_caching: bool) -> bool:
        """Allocates blocks for all tokens, from the longest cached prefix if
        `prefix_caching`.

        The last token is always left to compute. Returns False if there are too few blocks; then
        nothing is allocated or evicted.
        """
        match = Match([], None, 0)
        if prefix_caching and self.prefix_caching:
            match = self.index.match(kv.keys[:-1], kv.salt)
        missing = blocks_for(len(kv.tokens)) - len(match.blocks)
        if missing > self.available and match.partial_block is not None:
            self.index.free([match.partial_block])  # it may be needed itself
            match = Match(match.blocks, None, 0)
        if missing > self.available:
            self.index.free(match.blocks)
            return False
        kv.blocks = list(match.blocks)
        kv.indexed, kv.computed = len(match.blocks), match.tokens
        if match.partial_block is not None:
            self.extend(kv, kv.computed)
            self._copy(match.partial_block, kv)
        self.extend(kv, len(kv.tokens))
        if kv.cached is None:
            kv.cached = min(kv.computed, prompt)
        return True

    def extend(self, kv: KVState, tokens: int) -> bool:
        """Allocates blocks for `tokens` tokens. Returns False, with nothing allocated, if there are
        too few."""
        missing = kv.missing(tokens)
        if missing and missing > self.available:
            return False
        for _ in range(missing):
            block = self.index.allocate()
            assert block is not None
            kv.blocks.append(block)
        return True

    def branch(self, kv: KVState, tokens: int) -> list[int] | None:
        """Blocks for a continuation of a sequence beside its own, up to `tokens` tokens: from the
        one on in which what is computed ends, which is copied. None if there are too few."""
        first, rest = divmod(kv.computed, BLOCK)
        missing = blocks_for(tokens) - first
        if missing > self.available:
            return None
        blocks = []
        for _ in range(missing):
            block = self.index.allocate()
            assert block is not None
            blocks.append(block)
        if rest:
            self._copy_block(kv.blocks[first], blocks[0])
        return blocks

    def fork(self, parent: KVState, child: KVState) -> bool:
        """Shares computed blocks with a fork; a partly filled one is copied. Returns False if there
        is no block for the copy."""
        whole, rest = divmod(parent.computed, BLOCK)
        copied = self.index.allocate() if rest else None
        if rest and copied is None:
            return False
        child.blocks = parent.blocks[:whole]
        for block in child.blocks:
            self.index.share(block)
        if copied is not None:
            child.blocks.append(copied)
            self.index.share(parent.blocks[whole])
            self._copy(parent.blocks[whole], child)
        child.computed, child.indexed = parent.computed, parent.indexed
        return True

    def _copy(self, block: int, kv: KVState) -> None:
        """Copies a block into a sequence's last one and drops a reference to it. If that fails, the
        sequence holds no blocks."""
        try:
            self._copy_block(block, kv.blocks[-1])
        except BaseException:
            self.index.free([block])  # before those of the tokens before it
            self.free(kv)
            raise
        self.index.free([block])

    def advance(self, kv: KVState, count: int) -> None:
        """Notes that `count` more tokens are computed. Whole blocks enter the prefix index; of
        several tokens, as of a prompt that others may have too, also the partly filled last one.
        """
        kv.computed += count
        whole = kv.computed // BLOCK
        if count > 1 or whole > kv.indexed:
            self._insert(kv, kv.computed if count > 1 else whole * BLOCK)
            kv.indexed = whole

    def finish(self, kv: KVState) -> None:
        """Frees the blocks of a complete sequence; the partly filled last one is cached too."""
        if kv.computed > kv.indexed * BLOCK:
            self._insert(kv, kv.computed)
        self.free(kv)

    def free(self, kv: KVState) -> None:
        """Frees the blocks of a sequence, which has computed nothing then."""
        self.index.free(kv.blocks)
        kv.blocks = []
        kv.indexed = kv.computed = 0

    def _insert(self, kv: KVState, tokens: int) -> None:
        if self.prefix_caching:
            self.index.insert(kv.keys, kv.blocks, kv.salt, tokens, kv.indexed, kv.prompt)
