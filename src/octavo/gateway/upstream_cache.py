"""What an upstream's prefix caches hold: exactly, as it tells, or as what it was sent suggests.

Octavo's servers tell how many leading tokens of each prompt they hold (`server/cache_events.py`).
A prompt holds its blocks at an upstream while it is answered, and as many as are told from then on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.backends.base import BLOCK
from octavo.balance.cost import Ask
from octavo.balance.prefix_index import ReplicaPrefixes
from octavo.engine.block_changes import CachedPrompt
from octavo.gateway.body import BLOCK_TOKENS

MOST_SENT = 1 << 16  # blocks of prompts that are remembered of each upstream


@dataclass(eq=False)
class SentPrompt:
    """A prompt that an upstream was sent. held: leading blocks that it tells it holds. index: where
    that is noted."""

    index: ReplicaPrefixes
    blocks: tuple[int, ...]
    held: int = 0


class UpstreamCache:
    """The prefix caches of one upstream, which indexes know by its name. tells: it says what they
    hold."""

    def __init__(self, upstream: str) -> None:
        self.tells = False
        self._upstream = upstream
        self._prompts: OrderedDict[str, SentPrompt] = OrderedDict()  # by request, sent last last
        self._blocks = 0  # of all of them

    def resize(self, index: ReplicaPrefixes, tokens: int) -> None:
        """The upstream has room for so many tokens, 0 where that is not known."""
        index.resize(self._upstream, min(tokens // BLOCK_TOKENS, MOST_SENT))

    def begin(self, index: ReplicaPrefixes, ask: Ask) -> SentPrompt | None:
        """A request is sent to the upstream: what is to `end` with it."""
        if not self.tells:
            index.sent(self._upstream, ask.blocks)
            return None
        index.hold(self._upstream, ask.blocks)
        if (known := self._prompts.get(ask.id)) is None or known.blocks != ask.blocks:
            # Where requests share a name nobody knows of which the upstream tells.
            self._put(ask.id, SentPrompt(index, ask.blocks if known is None else ()))
        return SentPrompt(index, ask.blocks, len(ask.blocks))

    def end(self, prompt: SentPrompt | None) -> None:
        """A request has ended."""
        if prompt is not None:
            prompt.index.release(self._upstream, prompt.blocks)

    def _put(self, id: str, prompt: SentPrompt) -> None:
        self._forget(id)
        self._prompts[id] = prompt
        self._blocks += len(prompt.blocks)
        while self._blocks > MOST_SENT:
            self._forget(next(iter(self._prompts)))

    def _forget(self, id: str) -> None:
        """Ends what is known of a prompt."""
        if (prompt := self._prompts.pop(id, None)) is not None:
            self._blocks -= len(prompt.blocks)
            self._hold(prompt, 0)

    def _hold(self, prompt: SentPrompt, blocks: int) -> None:
        """So many leading blocks of a prompt are held from now on."""
        before, prompt.held = prompt.held, blocks
        if blocks > before:
            prompt.index.hold(self._upstream, prompt.blocks[before:blocks])
        else:
            prompt.index.release(self._upstream, prompt.blocks[blocks:before])

    def told(self, prompts: Iterable[CachedPrompt]) -> None:
        """The upstream tells what it holds of these prompts."""
        for told in prompts:
            if (prompt := self._prompts.get(told.id)) is None:
                continue  # somebody else has sent it
            if told.last:
                self._forget(told.id)
            elif told.cached + BLOCK > told.tokens:  # what is missing fills no block
                self._hold(prompt, len(prompt.blocks))
            else:
                self._hold(prompt, len(prompt.blocks) * told.cached // max(told.tokens, 1))

    def listen(self, indexes: Iterable[ReplicaPrefixes]) -> None:
        """The upstream begins to tell, all that it holds first: what was noted elsewhere is none of
        it."""
        self.tells = True
        for index in indexes:
            index.remove_replica(self._upstream)
        for prompt in self._prompts.values():
            prompt.held = 0
