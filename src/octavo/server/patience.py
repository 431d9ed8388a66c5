"""Signs of life in event streams that wait, so that nobody takes the connection for dead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.endpoint import Handler
from octavo.server.exchange import exchange
from octavo.server.http import EventStream, started

PATIENCE = 10.0  # seconds between signs of life
COMMENT = b": waiting\n\n"  # which clients of event streams skip
EVENTS = "text/event-stream"


async def comments(task: asyncio.Task[Any]) -> AsyncGenerator[bytes, None]:
    """Comments until a task has ended."""
    while not task.done():
        yield COMMENT
        await asyncio.wait({task}, timeout=PATIENCE)


async def stop(task: asyncio.Task[Any]) -> None:
    """Ends a task, if it has not ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def patient(handler: Handler, error_event: Callable[[bytes], bytes]) -> Handler:
    """A handler of event streams that shows signs of life while they are prepared: their model is
    loaded, or an image fetched. error_event: what then tells the JSON of an error."""

    @wraps(handler)
    async def wrapped(request: Request) -> Response:
        made = asyncio.ensure_future(handler(request))
        try:
            while not made.done():
                await asyncio.wait({made}, timeout=PATIENCE)
                if not made.done() and exchange(request.scope).stream_awaited:
                    late = await started(_late(made, error_event))
                    return EventStream(late, f"{EVENTS}; charset=utf-8")
        except BaseException:
            await _drop(made)
            raise
        return made.result()

    return wrapped


async def _late(
    made: asyncio.Task[Response], error_event: Callable[[bytes], bytes]
) -> AsyncGenerator[bytes, None]:
    try:
        yield b""
        async with aclosing(comments(made)) as waiting:
            async for comment in waiting:
                yield comment
        response = made.result()
        if not isinstance(response, EventStream):
            yield error_event(bytes(response.body))
            return
        async with aclosing(response.frames) as frames:
            async for frame in frames:
                yield frame
    finally:
        await _drop(made)


async def _drop(made: asyncio.Task[Response]) -> None:
    """Ends the making of a response, or a stream that is made and may not have been read."""
    await stop(made)
    if made.cancelled() or made.exception() is not None:
        return
    if isinstance(response := made.result(), EventStream):
        await response.frames.aclose()
