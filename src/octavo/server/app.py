"""The HTTP application: routes of all dialects and of the server itself."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp

from octavo.generate.media import MediaPolicy, MediaReader
from octavo.generate.trace import TraceFile
from octavo.server import adapters, models, page, replies
from octavo.server.about import about
from octavo.server.background import Background
from octavo.server.batches import Batches
from octavo.server.bodies import Bodies
from octavo.server.cache_events import CacheEvents
from octavo.server.cancel import cancel
from octavo.server.dialect import (
    Dialect,
    EmbedRoute,
    GenerateRoute,
    ScoreRoute,
    StoredRoute,
)
from octavo.server.dialects import DIALECTS
from octavo.server.endpoint import Endpoint, Handler
from octavo.server.exchange import OTHER, Observer, Running, Watcher
from octavo.server.exchanges import ExchangeMiddleware, RouteLabel
from octavo.server.fetching import Fetching
from octavo.server.guard import PAGE, Access, Keys, guarded
from octavo.server.http import json_response
from octavo.server.idempotency import Idempotency
from octavo.server.loopback import Loopback
from octavo.server.metrics import Metrics
from octavo.server.openapi import document, method_of
from octavo.server.profile import ProfileBody, ProfileRoute
from octavo.server.registry import Registry
from octavo.server.replicas import ReplicaRoutes
from octavo.server.requests import RequestRoutes, Requests
from octavo.server.routes import RouteTable, routing
from octavo.server.runner import Runner, answering
from octavo.server.sockets import Sockets
from octavo.server.source import Fetch
from octavo.server.store import Store
from octavo.server.stored import StoredResponses
from octavo.server.timelines import Timeline, Timelines
from octavo.server.usage import QUERY, UsageRoute

encode = msgspec.json.Encoder().encode
JSON = "application/json"
DOCS = Path(__file__).with_name("docs.html")


def fixed(make: Callable[[], bytes], media_type: str) -> Handler:
    """A handler that says the same to everybody, made when it is asked for first."""
    made = functools.cache(make)

    async def handler(request: Request) -> Response:
        return Response(await asyncio.to_thread(made), media_type=media_type)

    return handler


def _ready(registry: Registry) -> Handler:
    async def ready(request: Request) -> Response:
        """200 while every model can take requests. Models are counted: names may need a key."""
        ready, draining = registry.ready, registry.draining
        status = "ready" if ready else "draining" if draining else "not ready"
        states = Counter(entry.state for entry in registry)
        body = {"status": status, "models": dict(sorted(states.items()))}
        return json_response(encode(body), 200 if ready else 503)

    return ready


def described(dialects: tuple[Dialect, ...], own: list[Endpoint]) -> list[Endpoint]:
    """What says which endpoints there are, to programs and to people."""
    made = fixed(functools.partial(document, dialects, tuple(own)), JSON)
    docs = fixed(DOCS.read_bytes, "text/html; charset=utf-8")
    return [Endpoint("/openapi.json", "GET", made), Endpoint("/docs", "GET", docs)]


def endpoints(dialects: tuple[Dialect, ...]) -> frozenset[str]:
    """The paths of what computes something of a body."""
    kinds = (GenerateRoute, StoredRoute, EmbedRoute, ScoreRoute)
    return frozenset(r.path for d in dialects for r in d.routes if isinstance(r, kinds))


def _control(
    registry: Registry, access: Access, bodies: Bodies, lora_folder: Path | None,
    timelines: Timelines,
) -> list[Endpoint]:  # fmt: skip
    """What tells of requests and ends them, tells of usage, and changes what is served."""
    requests = RequestRoutes(timelines)
    lora, served = (
        adapters.AdapterRoutes(registry, bodies, lora_folder),
        models.ModelRoutes(registry, bodies),
    )
    found = [
        Endpoint("/v1/requests", "GET", requests.list, answer=Requests),
        Endpoint("/v1/requests/{id}", "GET", requests.show, answer=Timeline),
        Endpoint("/v1/requests/{id}/cancel", "POST", cancel(timelines.running)),
        Endpoint("/v1/usage", "GET", UsageRoute(access.keyring).show, query=QUERY),
        Endpoint(
            "/v1/models/load", "POST", served.load, models.LoadModelBody, answer=replies.Loaded
        ),
        Endpoint(
            "/v1/models/unload",
            "POST",
            served.unload,
            models.UnloadModelBody,
            answer=replies.Loaded,
        ),
        Endpoint(
            "/v1/load_lora_adapter",
            "POST",
            lora.load,
            adapters.LoadAdapterBody,
            answer=replies.Adapter,
        ),
        Endpoint(
            "/v1/unload_lora_adapter",
            "POST",
            lora.unload,
            adapters.UnloadAdapterBody,
            answer=replies.Adapter,
        ),
    ]
    profile = ProfileRoute(registry, bodies).record
    found.append(Endpoint("/v1/profile", "POST", profile, ProfileBody, answer=TraceFile))
    found += [*ReplicaRoutes(registry, bodies).table(), *CacheEvents(registry).table()]
    return [replace(one, handler=answering(one.handler)) for one in found]


def _spoken(
    dialect: Dialect, runner: Runner, kept: tuple[Store, Background] | None
) -> Iterator[Endpoint]:
    """The endpoints of a dialect. kept: what those need whose responses are kept."""
    for route in dialect.routes:
        if not isinstance(route, StoredRoute):
            yield Endpoint(route.path, method_of(route), runner.handler(dialect, route))
        elif kept is not None:
            yield from StoredResponses(runner, *kept, dialect, route).table()


def create_app(
    registry: Registry, metrics: Metrics, access: Access, observe: Observer,
    lora_folder: Path | None = None, dialects: tuple[Dialect, ...] = DIALECTS,
    store: Store | None = None, batches: Batches | None = None, loopback: Loopback | None = None,
    media: MediaPolicy | None = None, background: Background | None = None,
    timelines: Timelines | None = None, fetch: Fetch | None = None,
    watchers: Sequence[Watcher] = (), ui: bool = True,
) -> ASGIApp:  # fmt: skip
    """The ASGI application, which calls `observe` with every exchange that has ended.

    lora_folder: where adapters may be loaded from while serving. store: keeps responses.
    batches: runs batches. Without one there are no routes that need it. loopback: sends requests to
    the application past its checks. media: which images requests may have. background: what goes on
    after its request. timelines: of requests; its `running` is kept true. fetch: fetches
    models, None where that is forbidden. watchers: see each request. ui: whether
    browsers get the page.
    """
    bodies, default = Bodies(), dialects[0]
    timelines = timelines or Timelines(Running())
    running = timelines.running
    runner = Runner(registry, bodies, MediaReader(media), Fetching(registry, bodies, fetch))
    own = [
        *about(metrics, _ready(registry), replies.Health),
        *_control(registry, access, bodies, lora_folder, timelines),
    ]
    loopback, owner = loopback or Loopback(), Keys(access).owner
    if batches is not None:
        batches.loopback, batches.endpoints = loopback, endpoints(dialects)
        batches.sender = owner
        own += batches.table(bodies)
    own += described(dialects, own)
    table = [(one, default) for one in own]
    kept = None if store is None else (store, background or Background())
    table += [(one, d) for d in dialects for one in _spoken(d, runner, kept)]
    sockets = Sockets(loopback, default.error_body, owner)
    routes, paths = routing(table)
    routes = [WebSocketRoute("/v1/ws", sockets.serve), *(page.ROUTES if ui else ()), *routes]
    paths |= {path: RouteLabel(path, default.error_body) for path in ("/v1/ws", PAGE)}
    app = RouteTable(routes)
    other = RouteLabel(OTHER, default.error_body)
    loopback.app = ExchangeMiddleware(app, paths, other, observe, running)
    watched = guarded(Idempotency(app), access)
    for watcher in watchers:
        watched = watcher.wrap(watched)
    return ExchangeMiddleware(watched, paths, other, observe, running)
