"""Streams that another server can go on with, and what they say for it between their chunks.

A client that sends the field `resume` is told of every chunk which tokens it came of, in comments
of the event stream, which other clients skip. Were the stream to break, it sends the request again,
to any server of the same model, with the tokens that it was told of: the answer begins with the
very next byte. `octavo gateway` is such a client.

    data: {...}
    : tokens [464,3139]
    data: {...}
    : usage {"prompt_tokens":9,"completion_tokens":3,"cached_tokens":0}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from octavo.generate.reply import TextDelta
from octavo.server.parsing import NOT_JSON

encode = msgspec.json.Encoder().encode
TOKENS, USAGE = b": tokens ", b": usage "
END = b"\n\n"


class Resume(msgspec.Struct, kw_only=True, frozen=True):
    """What makes an answer the same wherever it is computed: its id, when it began, what it draws
    with if the request does not say, and the tokens that it has given so far."""

    id: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9._-]{1,64}$")]
    created: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    tokens: list[int] = []


class Spent(msgspec.Struct, frozen=True):
    """Tokens that an answer took."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


read_tokens = msgspec.json.Decoder(list[int]).decode
read_spent = msgspec.json.Decoder(Spent).decode


def told(tokens: list[int]) -> bytes:
    """Says which tokens the chunks before came of."""
    return TOKENS + encode(tokens) + END


def ended(spent: Spent) -> bytes:
    """Says that the stream is complete."""
    return USAGE + encode(spent) + END


def asking(body: bytes, resume: Resume) -> bytes:
    """The body of a request, an object of JSON with fields, with `resume` as its first one."""
    start = body.index(b"{") + 1
    return b"".join((body[:start], b'"resume":', encode(resume), b",", memoryview(body)[start:]))


class Teller:
    """Writes such a stream: leaves out what its client has, and tells of the rest."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._left = len(tokens)

    def tell(self, delta: TextDelta, chunks: bytes) -> bytes:
        """What is sent of the chunks of a delta. The last, and the end, are told of at once."""
        if delta.finish:
            return chunks
        if self._left > 0:
            self._left -= len(delta.ids)
            return b""
        return chunks + told(delta.ids)


class Follower:
    """Reads such a stream: what may be passed on, and where it is.

    Bytes are passed on once it is known which tokens they came of: what a client has then always
    ends where another server can begin.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens  # of all that was passed on
        self.spent: Spent | None = None  # once the stream is complete
        self._held = b""
        self._seen = 0  # bytes of what is held that have been looked through

    def feed(self, data: bytes) -> bytes:
        """What can be passed on now. Raises NOT_JSON for what no server says."""
        held = self._held + data if self._held else data
        ready, begin, look = b"", 0, self._seen
        while (end := held.find(END, look)) >= 0:
            start, look = look, end + len(END)
            if not held.startswith(b": ", start):
                continue
            try:
                ours = self._take(held[start:end])
            except NOT_JSON:
                if not ready:
                    raise
                look = start  # it is raised once what came before has been passed on
                break
            if ours or start == begin:  # another comment is a sign of life
                ready += held[begin : start if ours else look]
                begin = look
        self._held, self._seen = held[begin:], look - begin
        return ready

    @property
    def rest(self) -> bytes:
        """What has come and cannot be passed on."""
        return self._held

    def _take(self, comment: bytes) -> bool:
        """Whether a comment was one of these, whose news are taken over."""
        if comment.startswith(TOKENS):
            self.tokens += read_tokens(comment[len(TOKENS) :])
        elif comment.startswith(USAGE):
            self.spent = read_spent(comment[len(USAGE) :])
        else:
            return False
        return True
