"""Tells what prefix caches hold of prompts, as that changes: `octavo gateway` sends requests where
their beginnings are.

    data: {"prompts":[{"name":"a","tokens":530,"cached":512,"last":false}]}

A stream begins with all that is held. Prompts are called what the header `x-prompt-name` of their
requests has called them; of others nothing is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.client.cached_prompts import CachedPrompts
from octavo.engine.block_changes import CachedPrompt
from octavo.server.endpoint import Endpoint
from octavo.server.guard import require_admin
from octavo.server.http import EventStream, started
from octavo.server.registry import Registry

PATH = "/v1/cache/events"
PROMPT_NAME = "x-prompt-name"  # of a request
MOST_NAME = 8000  # characters of it
BEAT = 0.5  # seconds after which a stream shows that it is there
AT_ONCE = 64  # prompts of an event
encode = msgspec.json.Encoder().encode


class CacheEvent(msgspec.Struct):
    """Prompts of which more or less is held than before."""

    prompts: Sequence[CachedPrompt]


class CacheFeed:
    """What one stream tells: the prompts that have changed. find: the caches that there are now."""

    def __init__(self, find: Callable[[], Sequence[CachedPrompts]]) -> None:
        self._find = find
        self._caches: Sequence[CachedPrompts] = ()
        self._changed: dict[tuple[str, int], CachedPrompt] = {}  # since they were taken
        self._news = asyncio.Event()

    def _listen(self, prompts: Sequence[CachedPrompt]) -> None:
        self._changed |= {one.key: one for one in prompts}
        self._news.set()

    def follow(self) -> None:
        """Listens to the caches that there are, and not to those that were."""
        caches = self._find()
        for cache in caches:
            if cache not in self._caches:
                cache.listeners.add(self._listen)
                self._listen(list(cache))
        for cache in self._caches:
            if cache not in caches:
                cache.listeners.discard(self._listen)
                self._listen(list(cache))
        self._caches = caches

    def close(self) -> None:
        """Listens to nobody."""
        for cache in self._caches:
            cache.listeners.discard(self._listen)

    async def wait(self) -> None:
        """Returns once something has changed, or after BEAT seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT):
                await self._news.wait()

    def take(self) -> Iterator[CachedPrompt]:
        """What has changed: of a prompt that several engines hold, what the one has that holds the
        most of it."""
        changed, self._changed = self._changed, {}
        self._news.clear()
        for prompt in changed.values():
            held = [one for cache in self._caches if (one := cache.get(prompt)) is not None]
            if held:
                yield max(held, key=lambda one: one.cached)
            elif prompt.last:
                yield prompt
            else:  # its engine was unloaded
                yield msgspec.structs.replace(prompt, cached=0, last=True)


async def cache_events(feed: CacheFeed, goes_on: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
    """The frames of a stream of events, the first of them empty."""
    yield b""
    try:
        while goes_on():
            feed.follow()
            changed = list(feed.take())
            for at in range(0, len(changed), AT_ONCE):
                yield b"data: " + encode(CacheEvent(changed[at : at + AT_ONCE])) + b"\n\n"
            yield b": \n\n"
            await feed.wait()
    finally:
        feed.close()


def prompt_name(headers: Mapping[str, str]) -> str:
    """What a request calls its prompt, "" for nothing that is told of. headers: its own."""
    name = headers.get(PROMPT_NAME, "")
    return name if len(name) <= MOST_NAME else ""


def caches_of(registry: Registry) -> list[CachedPrompts]:
    """The prefix caches of all engines that there are."""
    clients = (entry.client for entry in registry if entry.client is not None)
    return [cache for client in clients for cache in client.caches]


class CacheEvents:
    """The handler of the stream, for admins."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def table(self) -> list[Endpoint]:
        return [Endpoint(PATH, "GET", self.stream, media="text/event-stream", answer=CacheEvent)]

    async def stream(self, request: Request) -> Response:
        """What prefix caches hold, until the server or its client ends."""
        require_admin(request.scope)
        feed = CacheFeed(partial(caches_of, self._registry))
        frames = cache_events(feed, lambda: not self._registry.draining)
        return EventStream(await started(frames), "text/event-stream")
