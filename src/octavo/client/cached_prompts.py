"""Which prompts an engine's prefix cache holds, as the front knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from octavo.engine.block_changes import CachedPrompt

Listener = Callable[[Sequence[CachedPrompt]], None]


class CachedPrompts:
    """The prompts that an engine has blocks of. listeners: are called with those that have
    changed."""

    def __init__(self) -> None:
        self._prompts: dict[tuple[str, int], CachedPrompt] = {}
        self.listeners: set[Listener] = set()

    def __iter__(self) -> Iterator[CachedPrompt]:
        return iter(self._prompts.values())

    def get(self, prompt: CachedPrompt) -> CachedPrompt | None:
        """What is held of the same prompt now, if blocks are that came with it."""
        return self._prompts.get(prompt.key)

    def take(self, changed: Sequence[CachedPrompt]) -> None:
        """What the engine tells."""
        for prompt in changed:
            if prompt.last:
                self._prompts.pop(prompt.key, None)
            else:
                self._prompts[prompt.key] = prompt
        if changed:
            for listen in list(self.listeners):
                listen(changed)

    def clear(self) -> None:
        """There is no engine any more, and nothing is held."""
        gone = [msgspec.structs.replace(each, cached=0, last=True) for each in self]
        self.take(gone)
