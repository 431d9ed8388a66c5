"""A transport on which the first bytes of an answer can be sent before there is an answer."""

from __future__ import annotations

import asyncio
from typing import Any

BEGINNING = b"HTTP/1.1 "  # of every answer, whatever its status


class Wire:
    """Writes to a transport. What has been sent ahead is left out of the next write.

    The end of a client's data says either that it has asked for all it wants, or that it is gone.
    Only sending tells which: a host answers data for a closed socket with a reset.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._ahead = 0

    def begin_answer(self) -> None:
        """Sends the next byte that any answer has."""
        if self._ahead < len(BEGINNING):
            self._transport.write(BEGINNING[self._ahead : self._ahead + 1])
            self._ahead += 1

    def write(self, data: bytes) -> None:
        self._transport.write(data[self._ahead :])
        self._ahead = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
