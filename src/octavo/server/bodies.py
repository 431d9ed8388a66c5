"""Reads request bodies within limits; large ones are decoded in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from octavo.errors import Overloaded, RequestError
from octavo.server.exchange import exchange
from octavo.server.http import ClientGone
from octavo.server.parsing import Body, Fields, FindBounds, parse
from octavo.server.sizes import SMALL

MAX_BODY = 8 << 20
DRAIN = 4 * MAX_BODY
MOST_HELD = 32 * MAX_BODY  # bytes of all bodies that are being read


class TooLarge(RequestError):
    status = 413


class Bodies:
    """Reads the bodies of all requests, whose total size is limited too."""

    def __init__(self, most: int = MOST_HELD) -> None:
        self._most = most
        self._held = 0

    async def read(
        self, request: Request, kind: type[Body], fields: Fields, find: FindBounds
    ) -> Body:
        """The request's body as `kind`, see `parse`. Raises RequestError, ClientGone."""
        async with self.whole(request) as data:
            if len(data) <= SMALL:
                return parse(data, kind, fields, find)
            return await asyncio.to_thread(parse, data, kind, fields, find)

    @asynccontextmanager
    async def whole(self, request: Request) -> AsyncIterator[bytes]:
        """The body's bytes. Raises TooLarge past MAX_BODY, ClientGone.

        A body up to DRAIN bytes is read to its end before, because clients read no response while
        they send.
        """
        given = [value for name, value in request.scope["headers"] if name == b"content-length"]
        declared = given[0][:20] if given else b""
        if declared.isdigit() and int(declared) > DRAIN:
            raise TooLarge(f"the body has {declared.decode()} bytes; {MAX_BODY} at most")
        data = bytearray()
        total, more = 0, True
        try:
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk, more = message.get("body", b""), message.get("more_body", False)
                total += len(chunk)
                if total <= MAX_BODY:
                    self._held += len(chunk)
                    data += chunk
                elif total > DRAIN:
                    break
                if self._held > self._most:
                    raise Overloaded("the server reads too many large bodies", code="overloaded")
            if total > MAX_BODY:
                raise TooLarge(f"the body is longer than {MAX_BODY} bytes")
            yield bytes(data)
        finally:
            self._held -= len(data)
            exchange(request.scope).received = total
