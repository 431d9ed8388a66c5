"""A transport that sends the head of a response along with what follows it, and the first bytes of
a response before there is one."""

from __future__ import annotations

import asyncio
from typing import Any

BEGINNING = b"HTTP/1.1 "  # of every response


class Wire:
    """Writes to a transport, `inner`. Bytes that were sent ahead are left out of the next head.

    A head waits for its body, until the event loop goes on at most: two calls of the system for one
    answer would wake its client twice.

    A client that has closed its sending side may still read, or be gone. Only sending tells which:
    a host answers data for a closed socket with a reset.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.inner = transport
        self._loop = asyncio.get_running_loop()
        self._ahead = 0
        self._head = b""  # that waits
        self._ended = False  # nothing more can be sent

    def begin_answer(self) -> None:
        """Sends the next byte that every response begins with."""
        self.flush()
        if self._ahead < len(BEGINNING):
            self.inner.write(BEGINNING[self._ahead : self._ahead + 1])
            self._ahead += 1

    def write(self, data: bytes) -> None:
        if data.startswith(BEGINNING):
            self.flush()
            self._head, self._ahead = data[self._ahead :], 0
            self._loop.call_soon(self.flush)
        else:
            head, self._head = self._head, b""
            self.inner.write(head + data if head else data)

    def write_eof(self) -> None:
        self.flush()
        self._ended = True
        self.inner.write_eof()

    def close(self) -> None:
        self.flush()
        self.inner.close()

    def flush(self) -> None:
        """Sends a head that waits."""
        head, self._head = self._head, b""
        if head and not self._ended and not self.inner.is_closing():
            self.inner.write(head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
