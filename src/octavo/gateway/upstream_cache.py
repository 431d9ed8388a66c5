"""What an upstream's prefix caches hold: exactly, as it tells, or as what it was sent suggests.

Octavo's servers tell how many leading tokens they hold of each prompt that a gateway has given a
name (`prompt_names.py`). A prompt holds its blocks at an upstream while it is answered, and as many
as are told for as long as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from octavo.balance.cost import Ask
from octavo.balance.prefix_index import ReplicaPrefixes
from octavo.engine.block_changes import CachedPrompt
from octavo.gateway.body import BLOCK_TOKENS
from octavo.gateway.prompt_names import NamedPrompt

MOST_SENT = 1 << 16  # blocks of prompts that are remembered of each upstream
MOST_TOLD = 1 << 19  # of all prompts that one tells of, those that they share counted for each
Indexes = Mapping[str, ReplicaPrefixes]  # by model


@dataclass(frozen=True)
class HeldBlocks:
    """Blocks that are held of a prompt, as an index has noted in an epoch."""

    epoch: int
    index: ReplicaPrefixes
    blocks: tuple[int, ...]


class UpstreamCache:
    """The prefix caches of one upstream, which indexes know by its name. tells: it says what they
    hold. outdated: ends what it tells, to begin anew. An epoch ends when all is forgotten."""

    def __init__(self, upstream: str) -> None:
        self.tells = False
        self.outdated: Callable[[], None] | None = None
        self._epoch = 0
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
        if held is not None and held.epoch == self._epoch:
            held.index.release(self._upstream, held.blocks)

    def _hold(self, index: ReplicaPrefixes, blocks: tuple[int, ...]) -> HeldBlocks:
        index.hold(self._upstream, blocks)
        return HeldBlocks(self._epoch, index, blocks)

    def told(self, prompts: Iterable[CachedPrompt], indexes: Indexes) -> None:
        """The upstream tells what it holds of these prompts."""
        for prompt in prompts:
            with suppress(ValueError):  # named by somebody else
                self._take(prompt, NamedPrompt.of(prompt.name), indexes)

    def _take(self, told: CachedPrompt, named: NamedPrompt, indexes: Indexes) -> None:
        before, index = self._told.pop(told.key, None), indexes.get(named.model)
        blocks = () if told.last else named.blocks[: named.held(told)]
        if blocks and index is not None:
            self._told[told.key] = self._hold(index, blocks)
            self._blocks += len(blocks)
        if before is not None:  # afterwards: what both hold is never gone
            self._let_go(before)
        while self._blocks > MOST_TOLD:
            self._let_go(self._told.pop(next(iter(self._told))))

    def _let_go(self, held: HeldBlocks) -> None:
        self._blocks -= len(held.blocks)
        self.end(held)

    def listen(self, indexes: Indexes) -> None:
        """The upstream begins to tell, all that it holds first: what was noted elsewhere is none of
        it."""
        self.forget()
        self.tells = True
        for index in indexes.values():
            index.remove_replica(self._upstream)

    def ignore(self) -> None:
        """The upstream does not tell any more; what is known is what it may hold."""
        self.tells, self.outdated = False, None

    def forget(self) -> None:
        """Indexes have forgotten the upstream: what it tells now would be but a part."""
        self._epoch += 1
        self._told.clear()
        self._blocks = 0
        if self.tells and self.outdated is not None:
            self.outdated()
