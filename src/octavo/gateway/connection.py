"""A connection to an upstream: HTTP/1.1, one request at a time, its answer read as it comes.

A client library that does more puts a queue, a timer and several calls between a socket and each
part of an answer, which is most of what it takes to pass a part on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

import httptools

Sink = Callable[[], bool]
MOST_HELD = 1 << 18  # bytes that nobody has read yet, from which on no more are taken


class NotHttp(ConnectionError):
    """What comes is no answer of HTTP."""


class UpstreamConnection(asyncio.Protocol):
    """Sends one request at a time to an upstream and holds what has come of its answer.

    status: of the answer, 0 until its headers have come; their names are in lower case. begun:
    something of it has come. ended: all of it has. error: why nothing more will. heard: when
    something came (`time.monotonic`).
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._parts: list[bytes] = []
        self.on_body = self._parts.append  # the parser calls it, for each part of a body
        self._parser: Any = httptools.HttpResponseParser(self)
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.begun = self.ended = self._asked = self._paused = False
        self.error: Exception | None = None
        self.heard = monotonic()
        self._parts.clear()
        self._held = 0
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None

    @property
    def usable(self) -> bool:
        """Another request can be sent: the last has its whole answer, and both sides stay and
        read."""
        return self.error is None and not self._paused and not self._transport.is_closing()

    @property
    def held(self) -> bool:
        """Something has come that was not read."""
        return bool(self._parts)

    def ask(self, head: bytes, body: bytes) -> None:
        """Sends a request. Raises OSError if the upstream has left, maybe since it was connected
        to."""
        if not self.usable:
            raise self.error or ConnectionResetError()
        self._reset()
        self._asked = True
        self._transport.writelines((head, body))

    async def asked(self, head: bytes, body: bytes) -> bool:
        """Sends a request: whether the head of an answer came, False if the upstream has left
        without a word. Raises OSError for what is no answer."""
        self.ask(head, body)
        while not self.status:
            if self.error is not None:
                if self.begun or isinstance(self.error, NotHttp):
                    raise self.error
                return False
            await self.come()
        return True

    def come(self, sink: Sink | None = None) -> asyncio.Future[None]:
        """Is done once something has come, or nothing more will. sink: is asked before, as long as
        the answer goes on, and says whether it took what has come; what it raises is raised."""
        self._waiter, self._sink = self._loop.create_future(), sink
        return self._waiter

    def forget(self) -> None:
        """Lets go of who has read the last answer."""
        self._sink = None
        if self._waiter is not None and self._waiter.done():
            self._waiter = None

    def take(self) -> bytes:
        """What has come of the body since."""
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._held = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _wake(self) -> None:
        if (waiter := self._waiter) is None or waiter.done():
            return
        try:
            over = self.ended or self.error is not None
            if over or (sink := self._sink) is None or not sink():
                waiter.set_result(None)
        except Exception as e:
            waiter.set_exception(e.with_traceback(None))  # which would hold this frame

    # -- what the event loop says -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard = monotonic()
        try:
            if not self._asked:
                raise NotHttp
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, NotHttp):
            self.error = NotHttp()
            self._transport.abort()
        self._wake()
        if self._parts:
            self._hold(len(data))

    def _hold(self, size: int) -> None:
        """So many bytes have come that nobody has read yet."""
        self._held += size
        if self._held > MOST_HELD and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        unframed = self.status and "content-length" not in self.headers
        if exc is None and unframed and "transfer-encoding" not in self.headers:
            self.ended = True  # such an answer is as long as its connection
        self.error = self.error or exc or ConnectionResetError()
        self._wake()

    # -- what the parser says ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.ended:
            raise NotHttp
        self.begun, self.headers = True, {}

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # else it comes after the body
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self.status = 0 if status < 200 else status  # others only say that it is at work

    def on_message_complete(self) -> None:
        if self.status:
            self.ended = True
            if not self._parser.should_keep_alive():
                self.error = ConnectionResetError()


def head_of(method: str, target: str, headers: Mapping[str, str], size: int) -> bytes:
    """The head of a request. Raises ValueError for what would be more than that."""
    lines = [f"{method} {target} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    if size or method != "GET":
        lines.append(f"content-length: {size}")
    head = "\r\n".join(lines)
    if head.count("\n") + head.count("\r") != 2 * len(lines) - 2 or "\0" in head:
        raise ValueError("a header has several lines")
    return f"{head}\r\n\r\n".encode()
