"""Puts configurations in force: all of one at a moment, or nothing of it."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import OctavoError, RequestError, UsageError, place
from octavo.gateway.admin import Admin
from octavo.gateway.admission import UpstreamQueue, WaitLimits
from octavo.gateway.config import ConfigFile, GatewayConfig, changes, read_config
from octavo.gateway.config_history import Applied, ConfigHistory
from octavo.gateway.health import Health, HealthCheck
from octavo.gateway.members import Members
from octavo.gateway.relay import Relay
from octavo.gateway.traffic import Traffic
from octavo.gateway.transport import Timeouts, Transport
from octavo.gateway.upstreams import Upstreams

LOG = logging.getLogger("octavo.gateway")


class ConfigChanged(RequestError):
    """Somebody else has changed the configuration meanwhile."""

    status = 409


def timeouts_of(config: GatewayConfig) -> Timeouts:
    return Timeouts(
        config.connect_timeout, config.first_token_timeout, config.idle_timeout,
        config.total_timeout,
    )  # fmt: skip


def limits_of(config: GatewayConfig) -> WaitLimits:
    return WaitLimits(config.max_queue, config.queue_timeout)


@dataclass(frozen=True)
class Started:
    """What a gateway was started with. file: that SIGHUP has read again; environ: has its keys."""

    config: ConfigFile
    environ: Mapping[str, str]
    file: Path | None = None


@dataclass(frozen=True)
class Parts:
    """What is told of a configuration."""

    upstreams: Upstreams
    transport: Transport
    admission: UpstreamQueue
    health: Health
    traffic: Traffic
    admin: Admin
    relay: Relay


class Control:
    """config: what is in force; applied: since when, and by whom."""

    def __init__(self, started: Started, history: ConfigHistory, parts: Parts) -> None:
        self.history = history
        self.config = GatewayConfig()
        self.applied: Applied | None = None
        self._started, self._parts = started, parts
        self._members = Members(parts.upstreams, parts.health)
        self.local = self._members.local
        parts.traffic.known = parts.admission.known = self._known
        self._one = asyncio.Lock()
        self._reloading: asyncio.Task[None] | None = None  # which nobody else refers to

    def _known(self, pool: str) -> bool:
        """Whether somebody can be in a pool."""
        return pool in self.config.pools or self._parts.upstreams.has(pool)

    async def start(self) -> None:
        """Puts in force what the gateway was started with; SIGHUP reads its file again from now on.
        Raises OctavoError."""
        await self.apply(self._started.config.running, "start")
        if self._started.file is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_signal)

    async def apply(
        self, config: GatewayConfig, who: str, dry_run: bool = False, made_of: int | None = None
    ) -> list[str]:
        """Puts a configuration in force: what it changes. made_of: the version that has to be in
        force. Raises OctavoError, and then all stays as it was."""
        async with self._one:
            now = None if self.applied is None else self.applied.version
            if made_of not in (None, now):
                raise ConfigChanged(
                    f"version {now} of the configuration is in force, not {made_of}: read it again"
                )
            return await self._swap(config, who, dry_run)

    async def edit(self, change: Callable[[GatewayConfig], GatewayConfig], who: str) -> list[str]:
        """Puts in force what a change makes of what is; no other comes between. Raises OctavoError
        as `apply` does."""
        async with self._one:
            return await self._swap(change(self.config), who, False)

    async def _swap(self, config: GatewayConfig, who: str, dry_run: bool) -> list[str]:
        environ = self._started.environ
        found = await self._members.find(config, environ)
        keys = {pool: config.key(pool, environ) for pool in (None, *config.pools)}
        lines = changes(self.config, config)
        if dry_run:
            return lines
        self.applied = await asyncio.to_thread(self.history.put, config, who, time.time())
        parts = self._parts
        parts.transport.configure(timeouts_of(config))
        parts.admission.limits = limits_of(config)
        parts.health.check = HealthCheck(config.probe_interval)
        parts.traffic.models = config.models
        parts.admin.keys, parts.relay.hedges.wait = keys, config.hedge
        parts.relay.cache.limit = config.response_cache
        parts.upstreams.configure(config.routing, config.max_inflight)
        if config.pools != self.config.pools:
            parts.relay.cache.forget()
        self._members.swap(found)
        self.config = config
        if who != "start":
            LOG.info("configuration %s of %s: %d changes", self.applied.version, who, len(lines))
        return lines

    async def reload(self, who: str) -> list[str]:
        """Reads the file again. Raises OctavoError."""
        if (file := self._started.file) is None:
            raise UsageError("the gateway was started without --config FILE, which it could read")
        new, old = await asyncio.to_thread(read_config, file), self._started.config
        for name in new.server.__struct_fields__:
            if getattr(new.server, name) != getattr(old.server, name):
                raise UsageError(
                    f"--config {str(file)!r}: server.{name} is only read at the start of a gateway"
                )
        return await self.apply(new.running, who)

    def _on_signal(self) -> None:
        """SIGHUP was sent."""
        self._reloading = asyncio.create_task(self._told())

    async def _told(self) -> None:
        try:
            await self.reload("SIGHUP")
        except OctavoError as e:
            LOG.error("%s; the configuration stays as it is", e)
        except Exception as e:  # nobody else would hear of it
            LOG.error("the configuration cannot be read again: %s", place(e))

    async def close(self) -> None:
        await self._members.close()
