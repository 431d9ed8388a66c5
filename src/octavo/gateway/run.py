"""Runs a gateway: finds upstreams, listens, passes requests on, drains, and ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from octavo.experiments.controller import Experiments
from octavo.gateway.admin import Admin
from octavo.gateway.admission import Admission, QueueLimits
from octavo.gateway.app import Door, create_app
from octavo.gateway.discovery import ASK, LOOK, Find, Follow, of_file, of_name
from octavo.gateway.health import Health, HealthCheck
from octavo.gateway.metrics import GatewayMetrics
from octavo.gateway.relay import Relay
from octavo.gateway.state import kept_in
from octavo.gateway.traffic import Traffic
from octavo.gateway.transport import Timeouts, Transport
from octavo.gateway.trials import Trials
from octavo.gateway.upstream import Place
from octavo.gateway.upstreams import Upstreams
from octavo.release.controller import Releases
from octavo.server.exchange import Exchange, Observer, Running
from octavo.server.guard import Access
from octavo.server.http_server import http_server
from octavo.server.logs import log_exchange

FIRST_LOOK = 5.0  # seconds for an upstream to answer before the gateway says that it is ready


@dataclass(frozen=True)
class GatewayOptions:
    """A gateway. places: requests at an upstream at once. key: that upstreams want to see."""

    access: Access
    upstreams: Sequence[Place] = ()
    file: Path | None = None
    names: Sequence[str] = ()  # whose addresses are upstreams
    key: str | None = None
    routing: str = "cost"
    places: int = 256
    timeouts: Timeouts = field(default_factory=Timeouts)
    queue: QueueLimits = field(default_factory=QueueLimits)
    health: HealthCheck = field(default_factory=HealthCheck)
    database: str | None = None  # of releases and experiments; None: in memory
    drain_timeout: int = 30
    write_timeout: float = 60


def sources(options: GatewayOptions) -> list[tuple[Find, float]]:
    """Where upstreams are looked for while serving, and how often."""
    found = [] if options.file is None else [(of_file(options.file, options.key), LOOK)]
    return found + [(of_name(name, options.key), ASK) for name in options.names]


async def serve(
    options: GatewayOptions, sock: socket.socket, *, ready: Callable[[Upstreams], None],
    ended: Observer,
) -> None:  # fmt: skip
    """Passes requests on until a signal. Raises OctavoError.

    ready: called once an upstream has answered, or none did for a while. ended: called with every
    exchange that has ended.
    """
    async with kept_in(options.database) as kept:
        await _serve(options, sock, *kept, ready, ended)


async def _serve(
    options: GatewayOptions, sock: socket.socket, releases: Releases, experiments: Experiments,
    ready: Callable[[Upstreams], None], ended: Observer,
) -> None:  # fmt: skip
    upstreams = Upstreams(options.routing, options.places)
    transport = Transport(options.timeouts)
    admission = Admission(upstreams, options.queue)
    health = Health(upstreams, transport, options.health)
    metrics, keyring = GatewayMetrics(upstreams, admission), options.access.keyring
    access = options.access
    guarded = bool(access.api_keys or access.admin_key or keyring)
    traffic = Traffic(releases, experiments)
    relay = Relay(admission, transport, health, traffic, metrics.relayed, guarded)
    door, running = Door(upstreams, admission), Running()

    def observe(one: Exchange) -> None:
        metrics.finished(one)
        log_exchange(one)
        if keyring is not None:
            keyring.count(one)
        ended(one)

    admin = Admin(upstreams, health, relay, admission, options.key)
    trials = Trials(releases, experiments, upstreams)
    app = create_app(
        upstreams, relay, admin, trials, door, metrics, options.access, observe, running
    )
    server = http_server(app, door, options.drain_timeout, options.write_timeout, observe, running)
    tasks = [asyncio.create_task(server.serve([sock]))]
    try:
        for place in options.upstreams:
            health.add(place)
        for find, seconds in sources(options):
            follow = Follow(health, find, seconds)
            follow.take(await asyncio.to_thread(find))
            tasks.append(asyncio.create_task(follow.run()))
        if keyring is not None:
            tasks.append(asyncio.create_task(keyring.watch()))
        tasks.append(asyncio.create_task(_tell(upstreams, ready)))
        await tasks[0]
    finally:
        server.should_exit = True
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await health.close()
        await transport.close()
        if keyring is not None:
            await keyring.close()


async def _tell(upstreams: Upstreams, ready: Callable[[Upstreams], None]) -> None:
    """Says that the gateway is ready once every upstream has answered or failed."""
    try:
        async with asyncio.timeout(FIRST_LOOK):
            while any(up.state == "starting" for up in upstreams):
                await asyncio.sleep(0.02)
    except TimeoutError:
        pass
    ready(upstreams)
