"""Which models a server has: their cards, and the routes that load and unload them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.backends.base import BLOCK
from octavo.balance.replica import ReplicaTimes
from octavo.errors import InvalidValue
from octavo.server.bodies import Bodies
from octavo.server.dialect import ModelCard
from octavo.server.exchange import exchange
from octavo.server.guard import require_admin
from octavo.server.http import json_response, while_connected
from octavo.server.parsing import Fields
from octavo.server.registry import Entry, ModelLease, Registry

encode = msgspec.json.Encoder().encode


def model_cards(registry: Registry) -> list[ModelCard]:
    """Every model that is loaded or can be, each followed by its adapters."""
    return [card for entry in registry for card in _cards(entry)]


def _cards(entry: Entry) -> list[ModelCard]:
    known = entry.model or entry.source
    if known is None:
        return []
    aliases, model = entry.aliases, entry.model
    stats: Mapping[str, int] = {} if model is None else model.client.stats
    figures = stats.get("blocks", 0) * BLOCK, ReplicaTimes.of(stats)
    own = ModelCard(entry.name, aliases, known.created, entry.state, None, model, *figures)
    adapters = [
        ModelCard(
            name, (), known.created, entry.state, entry.name, model and entry.called(name), *figures
        )
        for name in entry.adapters
    ]
    return [own, *adapters]


async def leased(request: Request, registry: Registry, name: str | None) -> ModelLease:
    """The use of a model until the exchange has ended. Raises RequestError, ClientGone."""
    lease = ModelLease(registry.entry(name), name)
    exchange(request.scope).at_end.append(lease.release)  # before: it may end as it is granted
    await while_connected(request.receive, registry.grant(lease))
    return lease


class LoadModelBody(msgspec.Struct, kw_only=True):
    """pinned: whether the model may be unloaded for another from now on; None: as it was."""

    model: str
    pinned: bool | None = None


class UnloadModelBody(msgspec.Struct, kw_only=True):
    model: str


class ModelRoutes:
    """The handlers of /v1/models/load and /v1/models/unload, for admins."""

    def __init__(self, registry: Registry, bodies: Bodies) -> None:
        self._registry = registry
        self._bodies = bodies

    async def load(self, request: Request) -> Response:
        require_admin(request.scope)
        body = await self._bodies.read(request, LoadModelBody, Fields(), self._registry.bounds)
        lease = await leased(request, self._registry, body.model)
        if body.pinned is not None:
            lease.entry.pinned = body.pinned
        return json_response(encode(_said(lease.entry)))

    async def unload(self, request: Request) -> Response:
        require_admin(request.scope)
        body = await self._bodies.read(request, UnloadModelBody, Fields(), self._registry.bounds)
        entry = self._registry.entry(body.model)
        if self._registry.loader is None or entry.source is None:
            raise InvalidValue(f"the model {entry.name!r} cannot be unloaded", "model")
        await while_connected(request.receive, self._registry.loader.unload(entry))
        return json_response(encode(_said(entry)))


def _said(entry: Entry) -> dict[str, object]:
    return {"model": entry.name, "state": entry.state, "pinned": entry.pinned}
