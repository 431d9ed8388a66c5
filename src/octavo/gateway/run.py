"""Runs a gateway: finds upstreams, listens, passes requests on, drains, and ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from octavo.gateway.admin import Admin
from octavo.gateway.admission import UpstreamQueue
from octavo.gateway.app import Door, create_app
from octavo.gateway.config import ConfigFile, Server
from octavo.gateway.config_admin import ConfigAdmin
from octavo.gateway.control import Control, Parts, Started, limits_of, timeouts_of
from octavo.gateway.health import Health, HealthCheck
from octavo.gateway.metrics import GatewayMetrics
from octavo.gateway.relay import Relay
from octavo.gateway.responses import Responses
from octavo.gateway.shadow import Shadow
from octavo.gateway.state import GatewayState, kept_in
from octavo.gateway.traffic import Traffic
from octavo.gateway.transport import Transport
from octavo.gateway.trials import Trials
from octavo.gateway.updates import Updates
from octavo.gateway.upstreams import Upstreams
from octavo.server.batches import Batches
from octavo.server.exchange import Exchange, Observer, Running, Watcher
from octavo.server.guard import Access
from octavo.server.http_server import http_server
from octavo.server.logs import log_exchange
from octavo.server.memory_spikes import MemorySpikes
from octavo.server.store import Store
from octavo.server.timelines import Timelines

FIRST_LOOK = 5.0  # seconds for an upstream to answer before the gateway says that it is ready


@dataclass(frozen=True)
class GatewayOptions:
    """A gateway. server: in place of what the configuration says of it. file: of the configuration,
    which a signal has read again. environ: has the keys that it names. watchers: see each request,
    and are closed in the end."""

    access: Access
    config: ConfigFile
    server: Server = Server()
    file: Path | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    write_timeout: float = 60
    watchers: Sequence[Watcher] = ()


async def serve(
    options: GatewayOptions, sock: socket.socket, *, ready: Callable[[Upstreams], None],
    ended: Observer,
) -> None:  # fmt: skip
    """Passes requests on until a signal. Raises OctavoError.

    ready: called once an upstream has answered, or none did for a while. ended: called with every
    exchange that has ended.
    """
    data = options.server.data
    with closing(Store(None if data is None else Path(data))) as store:
        async with kept_in(options.server.database) as state:
            await _serve(options, sock, state, Batches(store), ready, ended)


async def _serve(
    options: GatewayOptions, sock: socket.socket, state: GatewayState, batches: Batches,
    ready: Callable[[Upstreams], None], ended: Observer,
) -> None:  # fmt: skip
    config = options.config
    upstreams, transport = Upstreams(), Transport(timeouts_of(config))
    admission = UpstreamQueue(upstreams, limits_of(config))
    metrics, access = GatewayMetrics(upstreams, admission), options.access
    shadow, keyring = Shadow(state.releases, admission, transport), access.keyring
    guarded = bool(access.api_keys or access.admin_key or keyring)
    health = Health(upstreams, transport, HealthCheck(config.probe_interval), not guarded)
    traffic = Traffic(state.releases, state.experiments, shadow)
    relay = Relay(admission, transport, health, traffic, metrics.relayed, guarded)
    metrics.watch(relay.cache)
    door, timelines = Door(upstreams, admission), Timelines(Running(), metrics.slow)
    memory = MemorySpikes((), timelines.running, timelines.spikes, metrics.spiked)

    observers = [metrics.finished, timelines.add, memory.ended, log_exchange, ended]
    observers += [keyring.count] if keyring is not None else []
    observers += [watcher.observe for watcher in options.watchers]

    def observe(one: Exchange) -> None:
        for each in observers:
            each(one)

    admin = Admin(upstreams, health, relay, admission)
    parts = Parts(upstreams, transport, admission, health, traffic, admin, relay)
    control = Control(Started(config, options.environ, options.file), state.history, parts)
    trials = Trials(state.releases, state.experiments, upstreams, traffic)
    responses = Responses(state.kept, relay, upstreams, transport, health, door.check_open)
    updates = Updates(control, state.releases, upstreams, admission)
    handlers = (admin, updates, trials, ConfigAdmin(control), responses)
    more = [endpoint for each in handlers for endpoint in each.table()]
    app = create_app(
        upstreams, relay, door, metrics, batches, more, access, observe, timelines,
        options.server.ui, transport.name, options.watchers,
    )  # fmt: skip
    seconds = options.server.drain_timeout
    server = http_server(app, door, seconds, options.write_timeout, observe, timelines.running)
    tasks = [*map(asyncio.create_task, (server.serve_on(sock), memory.watch()))]
    try:
        await control.start()
        if keyring is not None:
            tasks.append(asyncio.create_task(keyring.watch()))
        tasks.append(asyncio.create_task(_tell(upstreams, ready)))
        batches.resume()
        await tasks[0]
    finally:
        server.should_exit = True
        for task in tasks[1:]:
            task.cancel()
        await batches.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(updates.close(), health.close())
        await asyncio.gather(control.close(), shadow.close())
        await transport.close()
        if keyring is not None:
            await keyring.close()
        for watcher in options.watchers:
            await asyncio.to_thread(watcher.close)


async def _tell(upstreams: Upstreams, ready: Callable[[Upstreams], None]) -> None:
    """Says that the gateway is ready once every upstream has answered or failed."""
    try:
        async with asyncio.timeout(FIRST_LOOK):
            while any(up.state == "starting" for up in upstreams):
                await asyncio.sleep(0.02)
    except TimeoutError:
        pass
    ready(upstreams)
