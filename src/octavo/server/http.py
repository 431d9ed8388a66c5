"""HTTP responses: JSON, errors, event streams, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from octavo.errors import RequestError
from octavo.server.exchange import Exchange, exchange
from octavo.server.presence import Presence

STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


def json_response(
    body: bytes, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(body, status, headers, "application/json")


def error_response(error: RequestError, scope: Scope) -> Response:
    """The response for an error, in the form that the route's clients expect. It is recorded."""
    exchange(scope).failed(error)
    headers = {}
    if (wait := error.retry_after) is not None:
        headers = {
            "retry-after": str(math.ceil(wait)), "retry-after-ms": str(math.ceil(1000 * wait)),
            "x-should-retry": "true",
        }  # fmt: skip
    elif error.status == 401:
        headers = {"www-authenticate": "Bearer"}
    elif error.status == 508:  # which client libraries would take for a passing fault
        headers = {"x-should-retry": "false"}
    return json_response(scope["error_body"](error), error.status, headers)


async def refuse(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    """Responds with an error instead of the application, to a request of either protocol."""
    response = error_response(error, scope)
    extensions = scope.get("extensions") or {}
    if scope["type"] == "websocket" and "websocket.http.response" not in extensions:
        return await send({"type": "websocket.close", "code": 1008, "reason": error.code or ""})
    await response(scope, receive, send)


async def silence() -> Message:
    """What a client sends that stays and says nothing."""
    await asyncio.Event().wait()
    raise AssertionError


class ClientMessages:
    """Receives what a client sends; a request that is cancelled looks as if its client had left.
    presence: of the client, where its connection tells of it."""

    def __init__(
        self, receive: Receive, one: Exchange, kind: str = "http", presence: Presence | None = None
    ) -> None:
        self._receive, self._one, self._kind, self._presence = receive, one, kind, presence
        if presence is not None:
            presence.one = one

    async def __call__(self) -> Message:
        one, task = self._one, current()
        one.listeners.add(task)
        try:
            if not one.cancelled:
                return await self._receive()
        except asyncio.CancelledError:
            if not one.cancelled or task.uncancel():  # it is cancelled for another reason, too
                raise
        finally:
            one.listeners.discard(task)
            del task  # its error holds this frame: a cycle, in which the whole request would stay
        return {"type": f"{self._kind}.disconnect"}

    def watch(self, leave: Callable[[], None]) -> Callable[[], None] | None:
        """Has `leave` called once the client has left, until what is returned is called; None:
        somebody has to listen for it."""
        one, presence = self._one, self._presence
        if presence is None or not presence.heed():
            return None
        if presence.gone or one.cancelled:
            asyncio.get_running_loop().call_soon(leave)
        one.at_leave.append(leave)
        return partial(one.at_leave.remove, leave)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, cancelled with ClientGone if the client disconnects first."""
    task, at_work, left = current(), True, False
    before = task.cancelling()

    def leave() -> None:
        nonlocal left
        if at_work and not left:
            left = task.cancel()

    forget = _watch(receive, leave)
    try:
        return await work
    except asyncio.CancelledError:
        if left and task.uncancel() <= before:
            raise ClientGone from None
        raise
    finally:
        at_work = False
        forget()


def _watch(receive: Receive, leave: Callable[[], None]) -> Callable[[], object]:
    """Has `leave` called once the client has left, until what is returned is called."""
    if isinstance(receive, ClientMessages) and (forget := receive.watch(leave)) is not None:
        return forget
    gone = asyncio.ensure_future(_disconnect(receive))
    gone.add_done_callback(lambda _: leave())
    return gone.cancel


def current() -> asyncio.Task[Any]:
    """The task that runs."""
    task = asyncio.current_task()
    assert task is not None
    return task


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response in chunks from a generator, which is closed as soon as the client is gone. One
    that holds something is `started`: closing another would do nothing."""

    def __init__(
        self, frames: AsyncGenerator[bytes, None], media_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.frames = frames
        self.status_code, self.media_type, self.background = 200, media_type, None
        self.init_headers({**STREAM_HEADERS, **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        one = exchange(scope)
        one.direct = getattr(send, "direct", None)
        try:
            async with aclosing(self.frames):
                start = {"status": 200, "headers": self.raw_headers}
                await send({"type": "http.response.start", **start})
                await while_connected(receive, self._pump(send, one))
        except ClientGone:
            one.status = 499
            if one.cancelled:  # there is somebody to tell
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send, one: Exchange) -> None:
        last = b""
        async for frame in self.frames:
            if one.final:
                last += frame
            else:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def started(frames: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """A generator after its first frame, which is empty: closing it frees what it holds."""
    first = await anext(frames)
    assert first == b""
    return frames
