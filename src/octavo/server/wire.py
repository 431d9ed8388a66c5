"""A transport that can send the first bytes of a response before there is a response."""

from __future__ import annotations

import asyncio
from typing import Any

BEGINNING = b"HTTP/1.1 "  # of every response


class Wire:
    """Writes to a transport, `inner`. Bytes that were sent ahead are left out of the next write.

    A client that has closed its sending side may still read, or be gone. Only sending tells which:
    a host answers data for a closed socket with a reset.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.inner = transport
        self._ahead = 0

    def begin_answer(self) -> None:
        """Sends the next byte that every response begins with."""
        if self._ahead < len(BEGINNING):
            self.inner.write(BEGINNING[self._ahead : self._ahead + 1])
            self._ahead += 1

    def write(self, data: bytes) -> None:
        self.inner.write(data[self._ahead :])
        self._ahead = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
