"""Signs that an answer is bad, which need no second model: empty, repeating itself, broken JSON."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from octavo.generate.reply import TextDelta

SIGNS = ("empty", "repetition", "invalid_json")
LOOK = 64  # tokens at the end that are looked at
TIMES = 4  # a piece that is there so often in a row is a repetition
MOST_JSON = 1 << 20  # characters of an answer that are read as JSON


class Quality:
    """Watches a choice. json: its text has to be JSON."""

    def __init__(self, json: bool) -> None:
        self._tail: deque[int] = deque(maxlen=LOOK)
        self._text: list[str] | None = [] if json else None
        self._calls: list[str] = []
        self._said = False

    def push(self, delta: TextDelta) -> list[str]:
        """Takes what is new of the choice; the signs of it, once it has ended by itself."""
        self._tail.extend(delta.ids)
        self._said = self._said or bool(delta.text or delta.reasoning or delta.calls)
        if self._text is not None:
            self._text.append(delta.text)
        for call in delta.calls:
            if call.id is not None:
                self._calls.append("")
            self._calls[-1] += call.arguments
        return self._signs(delta.finish) if delta.finish else []

    def _signs(self, finish: str) -> list[str]:
        texts = [*self._calls, *(["".join(self._text)] if self._text is not None else [])]
        found = (
            not self._said and finish == "stop",
            repeats(self._tail),
            self._said and broken(texts),
        )
        return [sign for sign, there in zip(SIGNS, found, strict=True) if there]


def repeats(tail: Sequence[int]) -> bool:
    """True if tokens end with a piece that is there TIMES times and fills half of LOOK."""
    ids = list(tail)
    for length in range(1, LOOK // TIMES + 1):
        span = max(TIMES * length, LOOK // 2)
        end = ids[-span:]
        if len(end) == span and end[length:] == end[:-length]:
            return True
    return False


def broken(texts: Iterable[str]) -> bool:
    """True if any of them is not JSON."""
    for text in texts:
        try:
            if len(text) <= MOST_JSON:
                msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            return True
    return False
