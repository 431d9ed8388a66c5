"""Profiles of engines and of the process in front of them, over the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from octavo.client.process import EngineProcessClient
from octavo.engine.call_timer import Call
from octavo.engine.profile import Profile, Profiler
from octavo.errors import Overloaded, RequestError
from octavo.generate.output import OutputProcessor

# Calls of the process in front of the engines, on the thread of its event loop.
FRONT: list[Call] = [
    (EngineProcessClient, "_handle", "take message"),
    (OutputProcessor, "push", "detokenize"),
]


class ProfileRunning(RequestError):
    """One is made already."""

    status = 409

    def __init__(self) -> None:
        message = "this server is being profiled; try again when that is over"
        super().__init__(message, None, "profile_running")


class Profiling:
    """Makes profiles, one at a time."""

    def __init__(self) -> None:
        self._running = False

    async def record(
        self, engines: Mapping[str, EngineProcessClient], work: Callable[[], Awaitable[object]]
    ) -> list[Profile]:
        """Profiles of this process and of each engine while `work` is done. Raises RequestError."""
        if self._running:
            raise ProfileRunning
        links = [client.link for client in engines.values() if client.ready and client.link]
        if len(links) < len(engines):
            raise Overloaded("an engine is starting", code="loading")
        self._running = True
        front = Profiler("front", FRONT)
        done = asyncio.ensure_future(_done(work))
        try:
            found = await asyncio.gather(*(link.profile(done) for link in links))
            await done
        finally:
            done.cancel()
            mine = front.stop()
            self._running = False
        names = [f"engine {name}".strip() for name in engines]
        named = (msgspec.structs.replace(p, name=n) for p, n in zip(found, names, strict=True))
        return [mine, *named]


async def _done(work: Callable[[], Awaitable[object]]) -> None:
    await work()
