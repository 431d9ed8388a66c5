"""Hears from Octavo's servers what their prefix caches hold (`server/cache_events.py`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

import msgspec

from octavo.engine.block_changes import CachedPrompt
from octavo.errors import place
from octavo.gateway.errors import UpstreamFailed
from octavo.gateway.headers import with_key
from octavo.gateway.transport import Answer, Transport
from octavo.gateway.upstream import Upstream
from octavo.gateway.upstreams import Upstreams
from octavo.server.cache_events import AT_ONCE, MOST_NAME, PATH, CacheEvent
from octavo.server.parsing import NOT_JSON

LOG = logging.getLogger("octavo.gateway")
SILENCE = 10.0  # seconds without a sign of life after which a stream has ended
PAUSE = 1.0  # seconds before one that has ended is asked for again
REFUSED = 300.0  # seconds before one that was refused is
MOST_HELD = 2 * AT_ONCE * MOST_NAME  # bytes of an event that has not ended
EVENTS, END = "text/event-stream", b"\n\n"
decode = msgspec.json.Decoder(CacheEvent).decode


class CacheSubscriptions:
    """Streams of cache events, of the upstreams that are followed, while they are up."""

    def __init__(self, upstreams: Upstreams, transport: Transport) -> None:
        self._upstreams, self._transport = upstreams, transport
        self._tasks: dict[Upstream, asyncio.Task[None]] = {}

    def follow(self, upstream: Upstream) -> None:
        """Listens to an upstream from now on, if it is Octavo."""
        if upstream.own and upstream not in self._tasks:
            self._tasks[upstream] = asyncio.create_task(self._follow(upstream))

    def leave(self, upstream: Upstream) -> None:
        """Does not listen to an upstream any longer."""
        if (task := self._tasks.pop(upstream, None)) is not None:
            task.cancel()

    async def _follow(self, upstream: Upstream) -> None:
        while True:
            pause = PAUSE
            if upstream.state == "up" and upstream.own:
                try:
                    pause = await self._listen(upstream)
                except UpstreamFailed:
                    pass  # probes tell whether it is down
                except Exception as e:  # whatever it is, requests go on
                    LOG.error("the cache events of upstream %s: %s", upstream.id, place(e))
            await asyncio.sleep(pause)

    async def _listen(self, upstream: Upstream) -> float:
        """Takes over what an upstream tells, until it ends: seconds to wait then. Raises
        UpstreamFailed."""
        headers = with_key({"accept": EVENTS}, upstream)
        answer = await self._transport.open(upstream, PATH, headers, b"", SILENCE, "GET")
        upstream.cut.add(answer.cut)
        upstream.cache.outdated = partial(answer.cut, "is to tell all it holds")
        try:
            if upstream.state != "up":
                return PAUSE  # since it was asked: who comes back has nothing cached
            if answer.status != 200 or answer.media_type != EVENTS:
                return REFUSED  # an older version, or it wants the key of an admin
            self._upstreams.listen(upstream)
            await self._read(upstream, answer)
        finally:
            upstream.cache.ignore()
            upstream.cut.discard(answer.cut)
            answer.close()
        return PAUSE

    async def _read(self, upstream: Upstream, answer: Answer) -> None:
        held = b""
        while len(held) <= MOST_HELD and (data := await answer.read()):
            *events, held = (held + data).split(END)
            for event in events:
                if event.startswith(b"data: "):
                    self._upstreams.told(upstream, _prompts(event[6:]))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for upstream in list(self._tasks):
            self.leave(upstream)
        await asyncio.gather(*tasks, return_exceptions=True)


def _prompts(event: bytes) -> Sequence[CachedPrompt]:
    """What an event tells; what no server of this kind says is no news."""
    try:
        return decode(event).prompts
    except NOT_JSON:
        return ()
