"""Changes a local model while it is used: a second pool, a release between both, and its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.database import Conflict, DatabaseError
from octavo.errors import InvalidValue, OctavoError, UsageError, place
from octavo.gateway.admission import UpstreamQueue
from octavo.gateway.config import GatewayConfig, LocalModel, Model, UpstreamPool
from octavo.gateway.config_admin import applied
from octavo.gateway.control import Control
from octavo.gateway.trials import asker, card, with_database
from octavo.gateway.upstreams import Upstreams
from octavo.release import spec as release_spec
from octavo.release.controller import Releases
from octavo.release.machine import ENDED
from octavo.release.spec import ReleaseSpec
from octavo.release.store import AlreadyRuns, Release
from octavo.server.bodies import Bodies
from octavo.server.endpoint import Endpoint
from octavo.server.guard import require_admin
from octavo.server.http import json_response
from octavo.server.parsing import NOT_JSON

LOG = logging.getLogger("octavo.gateway")
NEXT = "-next"  # the pool beside one, by turns
LOOK = 0.1  # seconds between looks
AGAIN = 1.0  # seconds until a database that was away is tried again
SETTLED = 5.0  # seconds without a request, more than one waits between two tries


class UpdateBody(msgspec.Struct, kw_only=True):
    """to: the new version of a model that a local pool serves. memory: of each of its servers, if
    not that of the old ones. release: its options, but for its pools."""

    model: str
    to: str
    memory: str | None = None
    release: dict[str, Any] = {}


class Updates:
    """Starts updates of local models, and removes the pool of who has lost."""

    def __init__(
        self, control: Control, releases: Releases, upstreams: Upstreams, admission: UpstreamQueue
    ) -> None:
        self._control, self._releases = control, releases
        self._upstreams, self._admission = upstreams, admission
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by model
        self._bodies = Bodies()

    def table(self) -> list[Endpoint]:
        return [Endpoint("/v1/releases/update", "POST", with_database(self.update), UpdateBody)]

    async def update(self, request: Request) -> Response:
        """Begins the release of a new version of a local model, once its servers answer."""
        require_admin(request.scope)
        async with self._bodies.whole(request) as data:
            try:
                body = msgspec.json.decode(data, type=UpdateBody)
            except NOT_JSON as e:
                raise InvalidValue(f"the body is no update: {e}") from None
        began: asyncio.Future[Release] = asyncio.get_running_loop().create_future()
        running = self._tasks.get(body.model)
        if running is not None and not running.done():
            raise AlreadyRuns(f"{body.model[:64]!r} is being updated", "model")
        task = asyncio.create_task(self._update(body, asker(request), began))
        self._tasks[body.model] = task
        task.add_done_callback(lambda _: began.cancel())  # if it has not heard by then
        release = await asyncio.shield(began)
        return json_response(msgspec.json.encode(card(release) | {"pool": release.spec.canary}))

    async def _update(self, body: UpdateBody, who: str, began: asyncio.Future[Release]) -> None:
        """The whole of an update. began: gets its release, or why there is none."""
        added, release = "", None  # the new pool, which goes again if no release begins
        try:
            spec, local = self._planned(body)
            await applied(self._control.edit(partial(_with, spec=spec, local=local), who))
            added = spec.canary
            await self._ready(spec, local)
            release = await asyncio.to_thread(self._releases.start, spec, who)
            if not began.done():
                began.set_result(release)
            await self._ended(release, spec)
        except Exception as e:
            if release is not None:  # nobody else would hear of it
                why = e if isinstance(e, OctavoError) else place(e)
                LOG.error("the update of %s cannot be ended: %s", body.model, why)
                return
            if added:
                await self._taken_back(body.model, added, who)
            if not began.done():
                began.set_exception(e)

    async def _taken_back(self, model: str, pool: str, who: str) -> None:
        """Removes the new pool of an update of which nothing came."""
        try:
            await self._changed(model, partial(_without, name=pool), who)
        except OctavoError as e:
            LOG.error("the update of %s leaves pool %s: %s", model, pool, e)

    async def _changed(
        self, model: str, change: Callable[[GatewayConfig], GatewayConfig], who: str
    ) -> None:
        """Puts in force what a change makes of the configuration, once the database is there.
        Raises OctavoError."""
        told = False
        while True:
            try:
                await self._control.edit(change, who)
                return
            except (Conflict, DatabaseError) as e:
                if not told:
                    LOG.warning("the update of %s waits to be ended: %s", model, e)
                told = True
            await asyncio.sleep(AGAIN)

    def _planned(self, body: UpdateBody) -> tuple[ReleaseSpec, LocalModel]:
        """The release and the new pool. Raises RequestError."""
        pools, model = self._control.config.pools, body.model
        last = self._releases.last(model)
        if last is not None and last.state.phase not in ENDED:
            raise AlreadyRuns(f"{model[:64]!r} has a release that has not ended", "model")
        old = "" if last is None else last.winner
        if old not in pools:
            old = self._control.config.models.get(model, Model()).pool
        served = old in pools and any(
            up.serves(model) for up in self._upstreams if up.place.pool == old
        )
        local = pools[old].local if served else None
        if local is None:
            raise InvalidValue(
                f"{model[:64]!r} is served by no local pool: it needs pools.{old}.local, or two "
                "pools and octavo release start", "model",
            )  # fmt: skip
        new = old.removesuffix(NEXT) if old.endswith(NEXT) else old + NEXT
        if new in pools:
            raise InvalidValue(f"there is a pool {new!r}, where the new version would be", "model")
        memory = body.memory or local.memory
        changed = msgspec.structs.replace(local, model=body.to, name=model, memory=memory)
        given = body.release | {"model": model, "stable": old, "canary": new}
        try:
            return release_spec.convert(given), changed
        except UsageError as e:
            raise InvalidValue(str(e), "release") from None

    async def _ready(self, spec: ReleaseSpec, local: LocalModel) -> None:
        """Until all servers of the new pool answer. Raises InvalidValue."""
        while self._serving(spec) < local.replicas:
            pool = self._control.local.pools.get(spec.canary)
            if pool is not None and pool.reason:
                raise InvalidValue(f"the new version does not start: {pool.reason}", "to")
            if spec.canary not in self._control.config.pools:
                raise InvalidValue(f"the pool {spec.canary!r} was removed meanwhile", "to")
            await asyncio.sleep(LOOK)

    def _serving(self, spec: ReleaseSpec) -> int:
        up = [u for u in self._upstreams if u.place.pool == spec.canary and u.state == "up"]
        return sum(spec.model in u.models for u in up)

    async def _ended(self, release: Release, spec: ReleaseSpec) -> None:
        """Removes the pool that lost, once the release has ended and nobody is served by it, unless
        the next release has it."""
        while True:
            last = self._releases.last(spec.model)
            if (
                last is not None
                and last.created >= release.created
                and (last.id != release.id or last.state.phase in ENDED)
            ):
                break
            await asyncio.sleep(LOOK)
        winner = last.winner if last.id == release.id else last.spec.stable
        lost = spec.stable if winner == spec.canary else spec.canary
        if winner not in (spec.stable, spec.canary) or self._has_next(release, lost):
            return
        await self._settled(lost)
        if self._has_next(release, lost):  # which has begun meanwhile
            return
        LOG.info("the release of %s has ended, and with it pool %s", spec.model, lost)
        await self._changed(spec.model, partial(_decided, spec=spec, lost=lost), "octavo")

    def _has_next(self, release: Release, pool: str) -> bool:
        """Whether the release after this one has a pool."""
        last = self._releases.last(release.spec.model)
        if last is None or last.id == release.id:
            return False
        return pool in (last.spec.stable, last.spec.canary)

    async def _settled(self, pool: str) -> None:
        """Until no request has been in a pool, or waited for it, for some time."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        while loop.time() - since < SETTLED:
            there = any(up.requests for up in self._upstreams if up.place.pool == pool)
            if there or self._admission.waits_for(pool):
                since = loop.time()
            await asyncio.sleep(LOOK)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


# -- what becomes of the configuration that is in force then -------------------------------------


def _with(config: GatewayConfig, spec: ReleaseSpec, local: LocalModel) -> GatewayConfig:
    old = config.pools.get(spec.stable)
    if old is None or old.local is None or spec.canary in config.pools:
        raise InvalidValue(
            f"the pools of {spec.model[:64]!r} were changed meanwhile; update it again", "model"
        )
    pools = config.pools | {spec.canary: UpstreamPool(local=local)}
    return msgspec.structs.replace(config, pools=pools)


def _without(config: GatewayConfig, name: str) -> GatewayConfig:
    pools = {n: pool for n, pool in config.pools.items() if n != name}
    return msgspec.structs.replace(config, pools=pools)


def _decided(config: GatewayConfig, spec: ReleaseSpec, lost: str) -> GatewayConfig:
    won = spec.canary if lost == spec.stable else spec.stable
    if won not in config.pools:
        raise UsageError(f"pool {won!r}, which won, was removed meanwhile; pool {lost!r} stays")
    config = _without(config, lost)
    return _moved(config, spec) if lost == spec.stable else config


def _moved(config: GatewayConfig, spec: ReleaseSpec) -> GatewayConfig:
    """With the new pool where models had the old one."""
    models = {spec.model: Model(pool=spec.stable)} | config.models
    for name, model in models.items():
        pool, *fallback = (
            spec.canary if each == spec.stable else each for each in (model.pool, *model.fallback)
        )
        models[name] = msgspec.structs.replace(model, pool=pool, fallback=tuple(fallback))
    return msgspec.structs.replace(config, models=models)
