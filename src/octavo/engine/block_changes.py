"""What an engine tells of its prefix cache to what routes requests to it."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakValueDictionary

import msgspec

from octavo.backends.base import BLOCK
from octavo.balance.chain import root


def salt_root(salt: str) -> int:
    """What the chain of a prompt begins with, of a salt as sequences have it: an adapter's part
    ends with a number that each engine counts for itself, which is left out."""
    own, end, _ = salt.rpartition("\0")
    return root(own if end else salt)


class CachedPrompt(msgspec.Struct, frozen=True):
    """How much of a prompt is in a prefix cache. name: that its sender has given it; tokens: of the
    prompt; cached: leading ones that are held. last: none of the blocks that came with it are left,
    so that no more will be told of it; what is held came with others."""

    name: str
    tokens: int
    cached: int
    last: bool

    @property
    def key(self) -> tuple[str, int]:
        """Which prompt it is: of those of one name, one that has so many tokens."""
        return self.name, self.tokens


@dataclass(eq=False, slots=True, weakref_slot=True)
class PromptBlocks:
    """The whole blocks of a prompt that came with its request. count: there are so many; end: so
    many leading blocks of the prompt are held."""

    name: str
    tokens: int
    count: int = 0
    end: int = 0

    @property
    def told(self) -> CachedPrompt:
        return CachedPrompt(self.name, self.tokens, self.end * BLOCK, not self.count)


class BlockChanges:
    """The whole blocks that a prefix index has stored, and those that it has removed, since they
    were taken last, and the prompts they are of. A block that came and went meanwhile is neither.
    """

    def __init__(self) -> None:
        self._stored: dict[int, None] = {}  # in their order
        self._removed: dict[int, None] = {}
        # for as long as a sequence or a block has them
        self._prompts: WeakValueDictionary[tuple[str, int], PromptBlocks] = WeakValueDictionary()
        self._changed: dict[PromptBlocks, None] = {}

    def prompt(self, name: str, tokens: int) -> PromptBlocks:
        """A prompt whose blocks may come: the same one for all that have it."""
        if (found := self._prompts.get((name, tokens))) is None:
            found = self._prompts[name, tokens] = PromptBlocks(name, tokens)
        return found

    def store(self, block: int, prompt: PromptBlocks | None, number: int) -> None:
        """A block has come. prompt: that it came with; number: of the block in it, from 1."""
        if block in self._removed:
            del self._removed[block]
        else:
            self._stored[block] = None
        if prompt is not None:
            prompt.count, prompt.end = prompt.count + 1, number
            self._changed[prompt] = None

    def remove(self, block: int, prompt: PromptBlocks | None, number: int) -> None:
        """A block has gone, as those after it have."""
        if block in self._stored:
            del self._stored[block]
        else:
            self._removed[block] = None
        if prompt is not None:
            prompt.count, prompt.end = prompt.count - 1, number - 1
            self._changed[prompt] = None

    def take(self) -> tuple[list[int], list[int], list[CachedPrompt]]:
        """What was stored, what was removed, and the prompts of which that was."""
        told = [prompt.told for prompt in self._changed]
        taken = list(self._stored), list(self._removed), told
        self._stored.clear()
        self._removed.clear()
        self._changed.clear()
        return taken
