"""Models that are fetched while serving, for admins."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.checkpoint.progress import Advance, ProgressBar
from octavo.errors import ModelNotFound, OctavoError, RequestError, UsageError
from octavo.server.bodies import Bodies
from octavo.server.dialect import Dialect, DownloadProgress, FetchRoute
from octavo.server.exchange import exchange
from octavo.server.guard import require_admin
from octavo.server.http import EventStream, json_response, while_connected
from octavo.server.registry import NotFound, Registry, unusable
from octavo.server.source import Fetch, NamedSource, add_source

LOG = logging.getLogger("octavo.server")
EVERY = 0.2  # seconds between reports of progress


class Fetching:
    """Fetches models and adds them to those that are served.

    fetch: None where that is forbidden. One model comes after the other. What has begun goes on
    without its client.
    """

    def __init__(self, registry: Registry, bodies: Bodies, fetch: Fetch | None) -> None:
        self._registry, self._bodies, self._fetch = registry, bodies, fetch
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def answer(self, dialect: Dialect, route: FetchRoute, request: Request) -> Response:
        """The response to a body that names a model."""
        require_admin(request.scope)
        body = await self._bodies.read(request, route.body, dialect.fields, self._registry.bounds)
        self._registry.check_open()
        if self._fetch is None:
            raise RequestError(
                "model: nothing can be fetched, the server was started with --offline", "model",
                "unsupported_parameter",
            )  # fmt: skip
        name = dialect.model_name(route.name(body)) or ""
        if not route.stream(body):
            await while_connected(request.receive, self._whole(self._fetch, name))
            return json_response(route.line("success", name, None))
        return EventStream(self._lines(self._fetch, name, route, request), route.media_type)

    async def _whole(self, fetch: Fetch, name: str) -> None:
        async for _ in self._steps(fetch, name):
            pass

    async def _lines(
        self, fetch: Fetch, name: str, route: FetchRoute, request: Request
    ) -> AsyncGenerator[bytes, None]:
        yield route.line("pulling manifest", name, None) + b"\n"
        try:
            async for step in self._steps(fetch, name):
                yield route.line(f"pulling {name}", name, step) + b"\n"
            yield route.line("success", name, None) + b"\n"
        except RequestError as e:
            exchange(request.scope).failed(e)
            yield request.scope["error_body"](e) + b"\n"

    async def _steps(self, fetch: Fetch, name: str) -> AsyncGenerator[DownloadProgress, None]:
        """The progress of a model that is fetched, until it is served. Raises RequestError."""
        told: asyncio.Queue[DownloadProgress | None] = asyncio.Queue()
        task = asyncio.create_task(self._add(fetch, name, reporting(told)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda t: t.cancelled() or t.exception())  # if nobody listens
        task.add_done_callback(lambda _: told.put_nowait(None))
        while (step := await told.get()) is not None:
            yield step
        task.result()

    async def _add(self, fetch: Fetch, name: str, progress: ProgressBar) -> None:
        """Fetches a model and adds it to those that are served. Raises RequestError."""
        async with self._turn:
            try:
                found = await in_thread(lambda: fetch(name, progress))
            except OctavoError as e:
                raise refusal(name, e) from None
        if found is not None:
            with suppress(UsageError):  # it has been found meanwhile
                add_source(self._registry, *found)
        LOG.info("%s is here", name)


def refusal(name: str, error: OctavoError) -> RequestError:
    """What a client is told of a model that cannot be fetched."""
    if isinstance(error, ModelNotFound):
        return NotFound(str(error), "model", "model_not_found")
    return error if isinstance(error, RequestError) else unusable(name, error)


def in_thread(work: Callable[[], NamedSource | None]) -> asyncio.Future[NamedSource | None]:
    """Runs what may take hours in a thread that the process does not wait for at its end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[NamedSource | None] = loop.create_future()

    def finish(method: str, value: Any) -> None:
        if not future.done():
            getattr(future, method)(value)

    def run() -> None:
        method: str = "set_result"
        value: Any = None
        try:
            value = work()
        except BaseException as e:
            method, value = "set_exception", e
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, method, value)

    threading.Thread(target=run, name="octavo-fetch", daemon=True).start()
    return future


def reporting(told: asyncio.Queue[DownloadProgress | None]) -> ProgressBar:
    """Reports to a queue from any thread, every EVERY seconds and at the end of each step."""
    loop, lock = asyncio.get_running_loop(), threading.Lock()

    @contextmanager
    def bar(what: str, total: int) -> Iterator[Advance]:
        done, last = 0, 0.0

        def advance(count: int) -> None:
            nonlocal done, last
            with lock:
                done += count
                if (now := time.monotonic()) - last >= EVERY:
                    last = now
                    loop.call_soon_threadsafe(told.put_nowait, DownloadProgress(done, total))

        yield advance
        loop.call_soon_threadsafe(told.put_nowait, DownloadProgress(done, total))

    return bar
