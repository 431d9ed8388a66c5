"""What an upstream's prefix caches hold: exactly, as it tells, or as what it was sent suggests.

Octavo's servers tell how many leading tokens they hold of each prompt that a gateway has given a
name (`prompt_names.py`). A prompt holds its blocks at an upstream while it is answered, and as many
as are told for as long as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from octavo.balance.cost import Ask
from octavo.balance.prefix_index import ReplicaPrefixes
from octavo.engine.block_changes import CachedPrompt
from octavo.gateway.body import BLOCK_TOKENS
from octavo.gateway.prompt_names import NamedPrompt

MOST_SENT = 1 << 16  # blocks of prompts that are remembered of each upstream
Indexes = Mapping[str, ReplicaPrefixes]  # by model


@dataclass(frozen=True)
class HeldBlocks:
    """Blocks that are held of a prompt, as an index has noted."""

    index: ReplicaPrefixes
    blocks: tuple[int, ...]


class UpstreamCache:
    """The prefix caches of one upstream, which indexes know by its name. tells: it says what they
    hold."""

    def __init__(self, upstream: str) -> None:
        self.tells = False
        self._upstream = upstream
        self._told: dict[tuple[str, int], HeldBlocks] = {}  # by prompt
        self._blocks = 0  # of all of them

    def resize(self, index: ReplicaPrefixes, tokens: int) -> None:
        """The upstream has room for so many tokens, 0 where that is not known."""
        index.resize(self._upstream, min(tokens // BLOCK_TOKENS, MOST_SENT))

    def begin(self, index: ReplicaPrefixes, ask: Ask) -> HeldBlocks | None:
        """A request is sent to the upstream: what is to `end` with it."""
        if self.tells:
            return self._hold(index, ask.blocks)
        index.sent(self._upstream, ask.blocks)
        return None

    def end(self, held: HeldBlocks | None) -> None:
        """A request has ended."""
        if held is not None:
            held.index.release(self._upstream, held.blocks)

    def _hold(self, index: ReplicaPrefixes, blocks: tuple[int, ...]) -> HeldBlocks:
        index.hold(self._upstream, blocks)
        return HeldBlocks(index, blocks)

    def told(self, prompts: Iterable[CachedPrompt], indexes: Indexes) -> None:
        """The upstream tells what it holds of these prompts."""
        for prompt in prompts:
            with suppress(ValueError):  # named by somebody else
                self._take(prompt, NamedPrompt.of(prompt.name), indexes)

    def _take(self, told: CachedPrompt, named: NamedPrompt, indexes: Indexes) -> None:
        before, index = self._told.pop(told.key, None), indexes.get(named.model)
        blocks = () if told.last else named.blocks[: named.held(told)]
        if blocks and index is not None and self._blocks + len(blocks) <= MOST_SENT:
            self._told[told.key] = self._hold(index, blocks)
            self._blocks += len(blocks)
        if before is not None:  # afterwards: what both hold is never gone
            self._blocks -= len(before.blocks)
            self.end(before)

    def listen(self, indexes: Indexes) -> None:
        """The upstream begins to tell, all that it holds first: what was noted elsewhere is none of
        it."""
        self.tells = True
        self._told.clear()
        self._blocks = 0
        for index in indexes.values():
            index.remove_replica(self._upstream)
