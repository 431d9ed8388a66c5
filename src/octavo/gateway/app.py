"""The gateway's HTTP application: the server's, with upstreams in place of engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp

from octavo.errors import Overloaded
from octavo.gateway.admission import UpstreamQueue
from octavo.gateway.loops import refusing_own
from octavo.gateway.metrics import GatewayMetrics
from octavo.gateway.relay import Relay
from octavo.gateway.upstreams import Upstreams
from octavo.server import page
from octavo.server.about import about
from octavo.server.app import described, endpoints
from octavo.server.batches import Batches
from octavo.server.bodies import Bodies
from octavo.server.cancel import cancel
from octavo.server.dialect import Dialect, EmbedRoute, GenerateRoute, ScoreRoute, TextRoute
from octavo.server.dialects import DIALECTS
from octavo.server.endpoint import Endpoint
from octavo.server.exchange import OTHER, Observer, Watcher
from octavo.server.exchanges import ExchangeMiddleware, RouteLabel
from octavo.server.guard import PAGE, Access, Keys, guarded
from octavo.server.http import json_response
from octavo.server.idempotency import Idempotency
from octavo.server.loopback import Loopback
from octavo.server.requests import RequestRoutes, Requests
from octavo.server.routes import RouteTable, routing
from octavo.server.runner import answering
from octavo.server.sockets import Sockets
from octavo.server.timelines import Timeline, Timelines
from octavo.server.usage import UsageRoute

encode = msgspec.json.Encoder().encode
PASSED = (GenerateRoute, EmbedRoute, ScoreRoute, TextRoute)


def _passed_of(dialect: Dialect) -> Dialect:
    """What is passed on of a dialect."""
    return replace(dialect, routes=tuple(r for r in dialect.routes if isinstance(r, PASSED)))


PASSED_DIALECTS = tuple(map(_passed_of, DIALECTS))


class Door:
    """What the gateway serves, as long as it is open."""

    def __init__(self, upstreams: Upstreams, admission: UpstreamQueue) -> None:
        self._upstreams, self._admission = upstreams, admission
        self.draining = False

    def check_open(self) -> None:
        """Raises Overloaded while the gateway drains."""
        if self.draining:
            raise Overloaded("the gateway is shutting down", code="shutting_down")

    async def close(self) -> None:
        """Cuts every answer that is still coming, and sends nothing to others any more."""
        self._admission.close()
        for upstream in self._upstreams:
            for cut in list(upstream.cut):
                cut("was left: the gateway is shutting down")


class AboutGateway:
    """Handlers that tell about the gateway."""

    def __init__(self, upstreams: Upstreams, door: Door) -> None:
        self._upstreams, self._door = upstreams, door

    async def ready(self, request: Request) -> Response:
        """200 while an upstream can take requests."""
        states = Counter(up.state for up in self._upstreams)
        ready = states["up"] > 0 and not self._door.draining
        status = "ready" if ready else "draining" if self._door.draining else "not ready"
        body = {"status": status, "upstreams": dict(sorted(states.items()))}
        return json_response(encode(body), 200 if ready else 503)

    def _owner(self, model: str) -> str:
        """Octavo, if all who may be asked for a model are: others know less of what is asked."""
        own = (up.own for up in self._upstreams if up.state == "up" and up.serves(model))
        return "octavo" if all(own) else "upstream"

    async def models(self, request: Request) -> Response:
        """The models of all upstreams that are up."""
        cards = [
            {"id": name, "object": "model", "created": 0, "owned_by": self._owner(name)}
            for name in sorted(self._upstreams.models)
        ]
        return json_response(encode({"object": "list", "data": cards}))


def create_app(
    upstreams: Upstreams, relay: Relay, door: Door, metrics: GatewayMetrics, batches: Batches,
    more: Sequence[Endpoint], access: Access, observe: Observer, timelines: Timelines, ui: bool,
    name: str, watchers: Sequence[Watcher] = (),
) -> ASGIApp:  # fmt: skip
    """The ASGI application, which calls `observe` with every exchange that has ended. Messages of
    sockets and lines of batches take the way of other requests. more: endpoints. timelines: of
    requests; its `running` is kept true. ui: whether browsers get the page. name: of the gateway,
    in what it passes on. watchers: see each request."""
    default, gateway = DIALECTS[0], AboutGateway(upstreams, door)
    requests, running = RequestRoutes(timelines), timelines.running
    loopback, owner = Loopback(), Keys(access).owner
    batches.loopback, batches.endpoints, batches.sender = loopback, endpoints(DIALECTS), owner
    own = [
        *about(metrics, gateway.ready),
        Endpoint("/v1/models", "GET", gateway.models),
        Endpoint("/v1/usage", "GET", answering(UsageRoute(access.keyring).show)),
        Endpoint("/v1/requests", "GET", answering(requests.list), answer=Requests),
        Endpoint("/v1/requests/{id}", "GET", answering(requests.show), answer=Timeline),
        Endpoint("/v1/requests/{id}/cancel", "POST", answering(cancel(running))),
        *batches.table(Bodies()),
        *more,
    ]
    own += described(PASSED_DIALECTS, own)
    table = [(one, default) for one in own]
    for dialect in PASSED_DIALECTS:
        for route in dialect.routes:
            passed = answering(partial(_passed, relay, door, route.path))
            table.append((Endpoint(route.path, "POST", passed), dialect))
    routes, paths = routing(table)
    sockets = Sockets(loopback, default.error_body, owner)
    paths |= {path: RouteLabel(path, default.error_body) for path in ("/v1/ws", PAGE)}
    sides = [WebSocketRoute("/v1/ws", sockets.serve), *(page.ROUTES if ui else ())]
    app, other = RouteTable([*sides, *routes]), RouteLabel(OTHER, default.error_body)
    loopback.app = ExchangeMiddleware(app, paths, other, observe, running)
    watched = refusing_own(guarded(Idempotency(app), access), name)
    for watcher in watchers:
        watched = watcher.wrap(watched)
    return ExchangeMiddleware(watched, paths, other, observe, running)


async def _passed(relay: Relay, door: Door, path: str, request: Request) -> Response:
    """The answer of an upstream."""
    door.check_open()
    return await relay.answer(request, path)
