"""Requests that a server sends itself: for messages of sockets and lines of batches.

They take the way of every other request, but for the connection and the checks that its sender has
passed already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from starlette.types import ASGIApp, Message

from octavo.errors import InvalidValue
from octavo.server.guard import Principal

Headers = Iterable[tuple[bytes, bytes]]
# status, media type, bytes, whether more will come
Part = Callable[[int, str, bytes, bool], Awaitable[None]]


class _Streamed(BaseException):
    """An answer comes in chunks. No error of a request: nothing else may catch it."""


class Loopback:
    """Sends requests to `app`, which has to be set before the first."""

    app: ASGIApp

    async def stream(
        self, path: str, body: bytes, sender: Principal, part: Part, gone: asyncio.Event,
        headers: Headers = (),
    ) -> None:  # fmt: skip
        """Posts a body, and calls `part` with each part of the answer, until the sender is gone."""
        scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "client": None, "server": None, "principal": sender,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                *headers,
            ],
        }  # fmt: skip
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        status, media = 0, ""

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status, media
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = dict(message["headers"])
                media = headers.get(b"content-type", b"").decode().partition(";")[0].strip().lower()
            else:
                more = message.get("more_body", False)
                await part(status, media, message.get("body", b""), more)

        await self.app(scope, receive, send)

    async def whole(self, path: str, body: bytes, sender: Principal) -> tuple[int, bytes]:
        """The status and the body of the answer. Raises InvalidValue for one that is streamed.

        To be cancelled is to leave: the request ends as one whose client has gone.
        """
        answer, last, gone = bytearray(), 0, asyncio.Event()

        async def part(status: int, media: str, data: bytes, more: bool) -> None:
            nonlocal last
            if media != "application/json":
                raise _Streamed
            last = status
            answer.extend(data)

        asking = asyncio.create_task(self.stream(path, body, sender, part, gone))
        try:
            await asyncio.shield(asking)
        except asyncio.CancelledError:
            gone.set()
            await asyncio.gather(asking, return_exceptions=True)
            raise
        except _Streamed:
            raise InvalidValue("stream has to be false here", "stream") from None
        return last, bytes(answer)
