"""Request bodies: read within limits, and understood where that holds nobody else up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request

from octavo.errors import Overloaded, RequestError
from octavo.server import schemas
from octavo.server.exchange import exchange
from octavo.server.http import ClientGone

MAX_BODY = 8 << 20
DRAIN = 4 * MAX_BODY
MOST_HELD = 32 * MAX_BODY  # bytes of all bodies that are being read
LARGE = 64 << 10  # bytes from which a body is understood beside the event loop
SLICE = 256 << 10
MAX_NUMBERS = 1_000_000  # entries of lists, about; decoding them holds the interpreter for 20 ms
MAX_NODES = 100_000  # lists, objects, their keys, and strings, which are dearer

Body = TypeVar("Body", bound=msgspec.Struct)


class TooLarge(RequestError):
    status = 413


class Bodies:
    """Reads the bodies of all requests, which together have a limit too."""

    def __init__(self) -> None:
        self._held = 0

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """The request's body as `kind`. Raises RequestError, ClientGone."""
        try:
            async with self._whole(request) as data:
                if len(data) <= LARGE:
                    return schemas.parse(data, kind)
                return await asyncio.to_thread(_parse, data, kind)
        except ClientDisconnect:
            raise ClientGone from None

    @asynccontextmanager
    async def _whole(self, request: Request) -> AsyncIterator[bytes]:
        """The body's bytes. Raises TooLarge past MAX_BODY.

        A body somewhat too large is read to its end and dropped, so that the client gets to see the
        answer.
        """
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared[:20]) > DRAIN:
            raise TooLarge(f"the body has {declared[:20]} bytes; {MAX_BODY} at most")
        data = bytearray()
        total = 0
        try:
            async for chunk in request.stream():
                total += len(chunk)
                if total <= MAX_BODY:
                    self._held += len(chunk)
                    data += chunk
                elif total > DRAIN:
                    break
                if self._held > MOST_HELD:
                    raise Overloaded("the server reads too many large bodies", code="overloaded")
            if total > MAX_BODY:
                raise TooLarge(f"the body is longer than {MAX_BODY} bytes")
            yield bytes(data)
        finally:
            self._held -= len(data)
            exchange(request.scope).received = total


def _parse(data: bytes, kind: type[Body]) -> Body:
    numbers, nodes = count_values(data)
    if numbers > MAX_NUMBERS or nodes > MAX_NODES:
        raise TooLarge(
            f"the body has {numbers:,} entries and {nodes:,} lists, objects and strings; "
            f"{MAX_NUMBERS:,} and {MAX_NODES:,} at most"
        )
    return schemas.parse(data, kind)


def count_values(data: bytes) -> tuple[int, int]:
    """About how many entries, and how many lists, objects and strings, JSON has.

    Counted in slices, so that other threads get their turn: decoding holds the interpreter
    throughout, and what it takes goes by these numbers rather than by bytes.
    """
    entries = nodes = 0
    inside = False  # whether the slice begins within a string
    rest = b""  # a backslash that the next slice is to be read with
    for start in range(0, len(data), SLICE):
        part = rest + data[start : start + SLICE]
        part = part.replace(b"\\\\", b"")
        rest = b"\\" if part.endswith(b"\\") else b""
        part = part[: len(part) - len(rest)].replace(b'\\"', b"")
        codes = np.frombuffer(part, np.uint8)
        quotes = codes == ord('"')
        within = np.logical_xor.accumulate(np.concatenate(([inside], quotes)))[1:]
        within = within.astype(bool)
        inside = bool(within[-1]) if len(within) else inside
        outside = codes[~within]
        sums = np.bincount(outside, minlength=128)
        entries += int(sums[ord(",")])
        nodes += int(sums[ord("[")] + sums[ord("{")]) + int(np.count_nonzero(quotes)) // 2
    return entries, nodes
