"""Changes of a gateway's configuration that come at the same time: none is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from octavo.database import Conflict, DatabaseError
from octavo.errors import DoesNotFit, InvalidValue, UsageError
from octavo.gateway import control as control_module
from octavo.gateway import local as local_module
from octavo.gateway import updates as updates_module
from octavo.gateway.admin import Admin
from octavo.gateway.admission import UpstreamQueue, WaitLimits
from octavo.gateway.config import ConfigFile, GatewayConfig, LocalModel, Model, UpstreamPool
from octavo.gateway.config_history import Applied
from octavo.gateway.control import ConfigChanged, Control, Parts, Started
from octavo.gateway.health import Health, HealthCheck
from octavo.gateway.local import LocalPool, LocalServers
from octavo.gateway.relay import Relay
from octavo.gateway.shadow import Shadow
from octavo.gateway.state import kept_in
from octavo.gateway.traffic import Traffic
from octavo.gateway.transport import Timeouts, Transport
from octavo.gateway.updates import UpdateBody, Updates, _decided, _with, _without
from octavo.gateway.upstreams import Upstreams
from octavo.release.machine import State
from octavo.release.spec import convert
from octavo.release.store import Release

POOLS = {name: UpstreamPool() for name in ("default", "default-next", "other")}
SPEC = convert({"model": "m", "stable": "default", "canary": "default-next"})


@asynccontextmanager
async def controlled(file: Path | None = None) -> AsyncIterator[Control]:
    """A control of these pools, which are empty, without a gateway around it."""
    async with kept_in(None) as state:
        upstreams, transport = Upstreams(), Transport(Timeouts())
        queue = UpstreamQueue(upstreams, WaitLimits())
        health = Health(upstreams, transport, HealthCheck())
        shadow = Shadow(state.releases, queue, transport)
        traffic = Traffic(state.releases, state.experiments, shadow)
        relay = Relay(queue, transport, health, traffic, lambda _: None, False)
        admin = Admin(upstreams, health, relay, queue)
        parts = Parts(upstreams, transport, queue, health, traffic, admin, relay)
        control = Control(Started(ConfigFile(pools=POOLS), {}, file), state.history, parts)
        await control.start()
        yield control
        await control.close()
        await health.close()
        await shadow.close()


def test_a_pool_that_is_removed_and_a_change_by_hand_are_both_in_force() -> None:
    async def run() -> None:
        async with controlled() as control:
            hand = msgspec.structs.replace(control.config, max_inflight=7)
            removed = control.edit(partial(_without, name="default"), "octavo")
            await asyncio.gather(control.apply(hand, "admin"), removed)
            assert control.config.max_inflight == 7
            assert sorted(control.config.pools) == ["default-next", "other"]

    asyncio.run(run())


def test_a_change_of_what_is_in_force_no_longer_is_refused() -> None:
    async def run() -> None:
        async with controlled() as control:
            hand = msgspec.structs.replace(control.config, max_inflight=7)
            removed = control.edit(partial(_without, name="default"), "octavo")
            late = control.apply(hand, "admin", made_of=1)
            _, refused = await asyncio.gather(removed, late, return_exceptions=True)
            assert str(refused) == (
                "version 2 of the configuration is in force, not 1: read it again"
            )
            assert isinstance(refused, ConfigChanged) and refused.status == 409
            assert sorted(control.config.pools) == ["default-next", "other"]
            await control.apply(hand, "admin", made_of=2)
            assert control.config == hand

    asyncio.run(run())


def test_the_pool_that_won_is_not_ended_with_the_other() -> None:
    config = GatewayConfig(pools=POOLS)
    won = _decided(config, SPEC, "default")
    assert sorted(won.pools) == ["default-next", "other"]
    assert won.models == {"m": Model(pool="default-next")}
    assert sorted(_decided(config, SPEC, "default-next").pools) == ["default", "other"]
    with pytest.raises(UsageError, match="^pool 'default-next', which won, was removed meanwhile"):
        _decided(_without(config, "default-next"), SPEC, "default")


def test_an_update_whose_end_meets_no_database_ends_once_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(updates_module, "AGAIN", 0.01)

    async def run() -> None:
        async with controlled() as control:
            put, away = control.history.put, [DatabaseError("it is away"), Conflict("another's")]

            def sometimes(*given: Any) -> Applied:
                if away:
                    raise away.pop()
                return put(*given)

            monkeypatch.setattr(control.history, "put", sometimes)
            updates = Updates(control, *cast(Any, (None, None, None)))
            await updates._changed("m", partial(_without, name="default"), "octavo")
            assert not away and sorted(control.config.pools) == ["default-next", "other"]

    asyncio.run(run())


def test_an_update_begins_with_the_pools_that_it_was_planned_for() -> None:
    local = LocalModel(model="m")
    planned = GatewayConfig(pools={"default": UpstreamPool(local=local)})
    assert sorted(_with(planned, SPEC, local).pools) == ["default", "default-next"]
    for pools in ({}, POOLS, {"default": UpstreamPool()}):
        with pytest.raises(InvalidValue, match="the pools of 'm' were changed meanwhile"):
            _with(GatewayConfig(pools=pools), SPEC, local)


def test_who_serves_a_model_once_a_release_has_ended() -> None:
    promoted = Release("r", SPEC, State("promoted", 4, 0.0, 0.0), 0.0)

    async def run() -> None:
        async with controlled() as control:
            traffic = control._parts.traffic
            assert traffic.serving("m", None) == "default"
            assert traffic.serving("m", promoted) == "default-next"
            moved = {"m": Model(pool="other")}
            await control.apply(msgspec.structs.replace(control.config, models=moved), "admin")
            assert traffic.serving("m", promoted) == "default-next"
            await control.edit(partial(_without, name="default-next"), "admin")
            assert traffic.serving("m", promoted) == "other"  # as requests go

    asyncio.run(run())


def test_what_changes_no_local_pool_is_not_refused_for_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Something else has taken memory since they began."""
    servers = LocalServers(Upstreams())
    pools = [LocalPool(servers, name, LocalModel(model="m")) for name in ("default", "other")]
    for pool in pools:
        pool.each = 6 << 30
    servers.pools["default"] = pools[0]
    monkeypatch.setattr(local_module, "available_memory", lambda: 2 << 30)
    servers.check([])
    with pytest.raises(DoesNotFit, match="^local pools do not fit: other 1 x "):
        servers.check(pools[1:])


def test_a_reload_that_fails_unexpectedly_is_told_and_the_next_one_heard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    found: list[Any] = [KeyError("secret"), ConfigFile(pools=POOLS, max_inflight=7)]

    def read(file: Path) -> ConfigFile:
        if isinstance(one := found.pop(0), Exception):
            raise one
        return one  # type: ignore[no-any-return]

    monkeypatch.setattr(control_module, "read_config", read)

    async def run() -> None:
        async with controlled(tmp_path / "file") as control:
            for places in (256, 7):
                control._on_signal()
                assert control._reloading is not None
                await control._reloading
                assert control.config.max_inflight == places

    asyncio.run(run())
    (told,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert told.startswith("the configuration cannot be read again: KeyError in read, line ")


def test_an_update_whose_end_fails_unexpectedly_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Updates):
        def _planned(self, body: UpdateBody) -> Any:
            return SPEC, LocalModel(model="m")

        async def _ready(self, spec: object, local: object) -> None:
            pass

        async def _ended(self, release: object, spec: object) -> None:
            raise KeyError("secret")

    async def edit(change: object, who: str) -> list[str]:
        return []

    async def run() -> None:
        control: Any = SimpleNamespace(edit=edit)
        releases: Any = SimpleNamespace(start=lambda spec, who: "release")
        upstreams = Upstreams()
        queue = UpstreamQueue(upstreams, WaitLimits())
        updates = Failing(control, releases, upstreams, queue)
        began = asyncio.get_running_loop().create_future()
        await updates._update(UpdateBody(model="m", to="n"), "admin", began)
        assert began.result() == "release"

    asyncio.run(run())
    (told,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert told.startswith("the update of m cannot be ended: KeyError in _ended, line ")
