"""Request bodies: read within limits, and understood where that holds nobody else up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from octavo.errors import Overloaded, RequestError
from octavo.server.dialects.openai.schemas import Body, parse
from octavo.server.exchange import exchange
from octavo.server.http import ClientGone
from octavo.server.sizes import SMALL, Model

MAX_BODY = 8 << 20
DRAIN = 4 * MAX_BODY
MOST_HELD = 32 * MAX_BODY  # bytes of all bodies that are being read


class TooLarge(RequestError):
    status = 413


class Bodies:
    """Reads the bodies of all requests, which together have a limit too."""

    def __init__(self, most: int = MOST_HELD) -> None:
        self._most = most
        self._held = 0

    async def read(self, request: Request, kind: type[Body], model: Model) -> Body:
        """The request's body as `kind`. Raises RequestError, ClientGone."""
        try:
            async with self._whole(request) as data:
                if len(data) <= SMALL:
                    return parse(data, kind, model)
                return await asyncio.to_thread(parse, data, kind, model)
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
                if self._held > self._most:
                    raise Overloaded("the server reads too many large bodies", code="overloaded")
            if total > MAX_BODY:
                raise TooLarge(f"the body is longer than {MAX_BODY} bytes")
            yield bytes(data)
        finally:
            self._held -= len(data)
            exchange(request.scope).received = total
