"""HTTP plumbing: bounded bodies, API keys, OpenAI's errors, work that ends with its client."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import Overloaded, RequestError
from octavo.server.replies import error_body

MAX_BODY = 8 << 20
DRAIN = 4 * MAX_BODY
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


class TooLarge(RequestError):
    status = 413


def json_response(
    body: bytes, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(body, status, headers, "application/json")


def error_response(error: RequestError) -> Response:
    headers = {}
    if isinstance(error, Overloaded):
        headers = {"retry-after": "1", "retry-after-ms": "500", "x-should-retry": "true"}
    return json_response(
        error_body(error.status, str(error), error.param, error.code), error.status, headers
    )


async def read_body(request: Request) -> bytes:
    """The request body. Raises TooLarge past MAX_BODY.

    A body somewhat too large is read to its end and dropped, so that the client gets to see the
    answer; beyond DRAIN the connection is cut.
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > DRAIN:
        raise TooLarge(f"the body has {declared[:20]} bytes; {MAX_BODY} at most")
    data = bytearray()
    total = 0
    async for chunk in request.stream():
        total += len(chunk)
        if total <= MAX_BODY:
            data += chunk
        elif total > DRAIN:
            break
    if total > MAX_BODY:
        raise TooLarge(f"the body is longer than {MAX_BODY} bytes")
    return bytes(data)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, cancelled with ClientGone if the client disconnects first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for t in (task, gone):
            t.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from a generator, which is closed as soon as the client is gone."""

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__(None, 200, SSE_HEADERS, "text/event-stream; charset=utf-8")
        del self.headers["content-length"]
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await while_connected(receive, self._pump(send))
        except ClientGone:
            return

    async def _pump(self, send: Send) -> None:
        async with aclosing(self._frames) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class ApiKeys:
    """ASGI middleware: with keys, every path but health needs `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: list[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(k.encode()).digest() for k in keys]

    def _allowed(self, scope: Scope) -> bool:
        """Whether a key matches. Its salt keeps cached prefixes apart from other keys'."""
        given = [v for k, v in scope["headers"] if k == b"authorization"]
        if len(given) != 1 or given[0][:7].lower() != b"bearer ":
            return False
        digest = hashlib.sha256(given[0][7:].strip()).digest()
        scope["salt"] = hashlib.sha256(b"salt" + digest).hexdigest()[:16]
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # always all
        return any(matches)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"] not in OPEN_PATHS
        if not self._digests or not guarded or self._allowed(scope):
            return await self._app(scope, receive, send)
        body = error_body(401, "a valid API key is needed", None, "invalid_api_key")
        await json_response(body, 401, {"www-authenticate": "Bearer"})(scope, receive, send)
