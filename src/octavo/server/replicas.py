"""The replicas of models, for admins: which there are, draining and restarting, and why requests
went where they went."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.client.base import EngineClient
from octavo.errors import InvalidValue
from octavo.server import replies
from octavo.server.bodies import Bodies
from octavo.server.endpoint import Endpoint
from octavo.server.guard import require_admin
from octavo.server.http import json_response, while_connected
from octavo.server.models import leased
from octavo.server.parsing import Fields
from octavo.server.registry import Entry, Registry

if TYPE_CHECKING:
    from octavo.client.replicas import Replicas

DRAIN_SECONDS = 30.0  # until what a replica has goes on elsewhere
encode = msgspec.json.Encoder().encode


class ReplicaBody(msgspec.Struct, kw_only=True):
    """A replica of a model, which may be left out where one is served. seconds: that it gets to end
    what it has."""

    replica: str
    model: str | None = None
    seconds: float = DRAIN_SECONDS


class ReplicaRoutes:
    """The handlers of /v1/replicas and /v1/routes."""

    def __init__(self, registry: Registry, bodies: Bodies) -> None:
        self._registry = registry
        self._bodies = bodies

    def table(self) -> list[Endpoint]:
        path = "/v1/replicas"
        return [
            Endpoint(path, "GET", self.show, answer=replies.Replicas),
            Endpoint(f"{path}/drain", "POST", self.drain, ReplicaBody, answer=replies.Replicas),
            Endpoint(f"{path}/resume", "POST", self.resume, ReplicaBody, answer=replies.Replicas),
            Endpoint(f"{path}/restart", "POST", self.restart, ReplicaBody, answer=replies.Replicas),
            Endpoint("/v1/routes", "GET", self.routes, answer=replies.Routes),
        ]

    async def show(self, request: Request) -> Response:
        """Every engine of every loaded model."""
        require_admin(request.scope)
        return _said(card for entry in self._registry for card in _cards(entry))

    async def routes(self, request: Request) -> Response:
        """The latest decisions between replicas, with what each would have cost."""
        require_admin(request.scope)
        found = ((e.name, r.routes) for e in self._registry if (r := _replicas(e.client)))
        return _said(
            {"model": model, "at": made.at, "prompt_tokens": made.tokens, "why": made.route.why,
             "replica": made.route.replica, "candidates": made.candidates}
            for model, routes in found for made in routes
        )  # fmt: skip

    async def drain(self, request: Request) -> Response:
        """A replica gets nothing new; answers once it has ended or given away what it had."""
        entry, client, body = await self._asked(request)
        await while_connected(request.receive, client.drain(body.replica, body.seconds))
        return _said(_cards(entry))

    async def resume(self, request: Request) -> Response:
        """A replica gets requests again."""
        entry, client, body = await self._asked(request)
        client.resume(body.replica)
        return _said(_cards(entry))

    async def restart(self, request: Request) -> Response:
        """A replica is drained and gets a new engine; answers once that is ready."""
        entry, client, body = await self._asked(request)
        await while_connected(request.receive, client.restart(body.replica, body.seconds))
        return _said(_cards(entry))

    async def _asked(self, request: Request) -> tuple[Entry, Replicas, ReplicaBody]:
        """What an admin wants done, with a model that stays loaded meanwhile."""
        require_admin(request.scope)
        body = await self._bodies.read(request, ReplicaBody, Fields(), self._registry.bounds)
        if not 0 <= body.seconds <= 86_400:
            raise InvalidValue("seconds is between 0 and 86,400", "seconds")
        lease = await leased(request, self._registry, body.model)
        if (client := _replicas(lease.model.client)) is None:
            raise InvalidValue(f"{lease.entry.name} has one engine; see --replicas", "replica")
        return lease.entry, client, body


def _said(data: Iterator[Any]) -> Response:
    return json_response(encode({"object": "list", "data": list(data)}))


def _replicas(client: EngineClient | None) -> Replicas | None:
    """A client, if it is several engines."""
    from octavo.client.replicas import Replicas  # which few servers need

    return client if isinstance(client, Replicas) else None


def _cards(entry: Entry) -> Iterator[dict[str, Any]]:
    if (client := entry.client) is None:
        return
    from octavo.client.replicas import engines

    replicas = _replicas(client)
    states = replicas.states if replicas else {}
    for name, engine in engines(client).items():
        state = states.get(name, "up" if engine.ready else "down")
        counts = {each: engine.stats.get(each, 0) for each in ("running", "waiting", "restarts")}
        yield {"model": entry.name, "replica": name, "state": state, "pid": engine.pid} | counts
