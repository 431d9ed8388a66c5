"""The upstreams that a configuration names, and those that its sources find."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from octavo.errors import UsageError
from octavo.gateway.config import GatewayConfig
from octavo.gateway.discovery import (
    ASK,
    KUBERNETES,
    LOOK,
    Polled,
    Take,
    UpstreamSource,
    of_file,
    of_name,
    parse_service,
)
from octavo.gateway.health import Health
from octavo.gateway.local import LocalPool, LocalServers
from octavo.gateway.upstream import Place, Upstream
from octavo.gateway.upstreams import Upstreams

LOG = logging.getLogger("octavo.gateway")
Name = tuple[str | None, ...]  # of a source: equal ones find the same


def sources_of(config: GatewayConfig, environ: Mapping[str, str]) -> dict[Name, UpstreamSource]:
    """Where upstreams are looked for. Raises UsageError."""
    found: dict[Name, UpstreamSource] = {}
    for pool, said in config.pools.items():
        key = config.key(pool, environ)
        if said.file is not None:
            file = Polled(of_file(Path(said.file), key, pool), LOOK)
            found["file", said.file, pool, key] = file
        for url in said.dns:
            found["dns", url, pool, key] = Polled(of_name(url, key, pool), ASK)
        for one in said.addresses(KUBERNETES):
            own = config.key(pool, environ, one.key)
            found["kubernetes", one.url, pool, own] = _of_service(one.url, environ, pool, own)
    return found


def _of_service(url: str, environ: Mapping[str, str], pool: str, key: str | None) -> UpstreamSource:
    try:
        from octavo.gateway.kubernetes import EndpointSlices, cluster_of
    except ModuleNotFoundError:
        raise UsageError(
            f"{url} needs aiohttp; install it: pip install 'octavo[kubernetes]'"
        ) from None
    return EndpointSlices(parse_service(url), cluster_of(environ), pool, key)


@dataclass(frozen=True)
class Found:
    """What a configuration names and finds. looked: by sources that are new."""

    places: Sequence[Place]
    sources: Mapping[Name, UpstreamSource]
    looked: Mapping[Name, list[Place]]


class Members:
    """Adds and drains upstreams as they come and go. Those that admins add are none of these."""

    def __init__(self, upstreams: Upstreams, health: Health) -> None:
        self._upstreams, self._health = upstreams, health
        self.local = LocalServers(upstreams)
        self._places: Sequence[Place] = ()
        self._found: dict[Name, list[Place]] = {}  # by sources
        self._tasks: dict[Name, asyncio.Task[None]] = {}
        self._mine: dict[str, Upstream] = {}
        self._said: set[str] = set()

    async def find(self, config: GatewayConfig, environ: Mapping[str, str]) -> Found:
        """What a configuration names and finds; nothing changes yet. Raises UsageError."""
        places = config.places(environ)
        sources = sources_of(config, environ) | self._local_pools(config)
        new = [name for name in sources if name not in self._found]
        looked = await asyncio.gather(*(sources[name].look() for name in new))
        self.local.check([s for name in new if isinstance(s := sources[name], LocalPool)])
        return Found(places, sources, dict(zip(new, looked, strict=True)))

    def _local_pools(self, config: GatewayConfig) -> dict[Name, UpstreamSource]:
        return {
            ("local", pool, repr(said.local)): LocalPool(self.local, pool, said.local)
            for pool, said in config.pools.items() if said.local is not None
        }  # fmt: skip

    def swap(self, found: Found) -> None:
        """These are the upstreams from now on, also those that an admin has removed; sources go on
        where they were there before."""
        for name in self._found.keys() - found.sources.keys():
            del self._found[name]
            self._tasks.pop(name).cancel()
        self._places = found.places
        self._found |= found.looked
        for name in found.looked:
            follow = found.sources[name].follow(self._taker(name))
            self._tasks[name] = asyncio.create_task(follow)
        self._mine = {n: up for n, up in self._mine.items() if self._upstreams.get(n) is up}
        self._update()

    def _taker(self, name: Name) -> Take:
        return partial(self._take, name)

    def _take(self, name: Name, places: list[Place]) -> None:
        if name not in self._tasks:  # which has not heard yet that it is no source any longer
            return
        self._found[name] = places
        self._update()

    def _update(self) -> None:
        """Those that nobody names any longer are drained."""
        wanted: dict[str, Place] = {}
        for place in (*self._places, *(p for found in self._found.values() for p in found)):
            if (other := wanted.setdefault(place.id, place)).pool != place.pool:
                self._say(f"upstream {place.id} is in the pool {other.pool}, not in {place.pool}")
        for name in self._mine.keys() - wanted.keys():
            if self._upstreams.get(name) is (upstream := self._mine.pop(name)):
                self._health.retire(upstream)
        for name, place in wanted.items():
            if name not in self._mine or self._mine[name].place != place:
                self._mine[name] = self._health.add(place)

    def _say(self, what: str) -> None:
        """Warns of what is so at every look, once."""
        if what not in self._said:
            self._said.add(what)
            LOG.warning("%s", what)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self.local.closing = True
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self.local.close()
