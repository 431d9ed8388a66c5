"""What can be told of an answer that is passed on: whether it is empty, or goes in circles."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from octavo.release.answers import LONGEST, ROUNDS, repeating
from octavo.server.parsing import NOT_JSON


class _Said(msgspec.Struct):
    """Servers have two names for thoughts, and older ones one for calls."""

    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None

    @property
    def anything(self) -> bool:
        return any(getattr(self, name) for name in self.__struct_fields__)


class _Choice(msgspec.Struct):
    index: int | None = None  # of several
    text: str | None = None
    delta: _Said | None = None
    message: _Said | None = None
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class Seen:
    """Reads answers of /v1/chat/completions and /v1/completions; of others it knows nothing. Of
    their text it keeps the last words, of each choice, and forgets them with the request."""

    def __init__(self) -> None:
        self._rest = b""
        self._ended = self._said = False
        self._last: dict[int | None, deque[str]] = {}

    @property
    def empty(self) -> bool:
        return self._ended and not self._said

    @property
    def repeating(self) -> bool:
        return any(repeating(list(last)) for last in self._last.values())

    def feed(self, data: bytes) -> None:
        """More of a stream."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):  # which need not be followed by a space
                self._take(line[5:], streamed=True)

    def whole(self, body: bytes) -> None:
        """An answer that has come as a whole."""
        self._take(body, streamed=False)

    def _take(self, data: bytes, streamed: bool) -> None:
        try:
            answer = msgspec.json.decode(data, type=_Answer)
        except NOT_JSON:
            return
        for choice in answer.choices:
            said = choice.delta or choice.message or _Said(choice.text)
            self._ended |= choice.finish_reason is not None
            self._said |= said.anything
            if isinstance(said.content, str) and said.content:
                last = self._last.setdefault(choice.index, deque(maxlen=LONGEST * ROUNDS))
                last.extend([said.content] if streamed else said.content.split())
