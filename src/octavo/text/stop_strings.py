"""Searching text that arrives in pieces: for stop strings, and for markers."""

from __future__ import annotations

from collections.abc import Iterable


def first_match(text: str, wanted: Iterable[str]) -> tuple[int, str] | None:
    """Where the first of the wanted strings begins, and which; the longest of several there."""
    found = [(at, -len(w), w) for w in wanted if (at := text.find(w)) >= 0]
    if not found:
        return None
    at, _, match = min(found)
    return at, match


def partial_match(text: str, wanted: Iterable[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a wanted string."""
    return max((_overlap(text, w) for w in wanted), default=0)


def _overlap(text: str, wanted: str) -> int:
    lengths = range(min(len(wanted) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(wanted[:n])), 0)


class StopStrings:
    """Cuts streamed text at the first stop string.

    Text that may be the beginning of a stop string is held back. matched: the one that was found.
    """

    def __init__(self, stops: list[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is safe to show. After a match nothing more comes."""
        if self.matched is not None:
            return ""
        text = self._held + text
        if found := first_match(text, self._stops):
            cut, self.matched = found
            self._held = ""
        else:
            cut = len(text) - partial_match(text, self._stops)
            self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """The held text, when the stream ends without a match."""
        held, self._held = self._held, ""
        return held
