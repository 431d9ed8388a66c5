"""ASGI applications called directly, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp, Message

from octavo.errors import RequestError
from octavo.server.exchange import Exchange


def error_body(error: RequestError) -> bytes:
    return f"{error.status} {error.code}: {error}".encode()


def scope(kind: str = "http", path: str = "/", **headers: str) -> dict[str, Any]:
    """What a server passes for a request to localhost; `_` in the names of headers is `-`."""
    given = {"host": "localhost", **headers}
    return {
        "type": kind, "path": path, "raw_path": path.encode(), "method": "POST",
        "http_version": "1.1", "query_string": b"", "scheme": "http",
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in given.items()],
        "exchange": Exchange(), "error_body": error_body,
    }  # fmt: skip


def call(
    app: ASGIApp, asked: dict[str, Any], messages: Iterable[Message] = ({"type": "http.request"},)
) -> list[Message]:
    """What an application sends. After `messages`, the client says nothing more."""
    sent: list[Message] = []
    left = list(messages)

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        await app(asked, receive, send)

    asyncio.run(run())
    return sent
