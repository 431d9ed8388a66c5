"""The HTTP application: routes of all dialects and of the server itself."""

from __future__ import annotations

from collections import Counter
from http import HTTPStatus
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from octavo import __version__
from octavo.errors import RequestError
from octavo.generate.media import MediaPolicy, MediaReader
from octavo.server.adapters import AdapterRoutes
from octavo.server.bodies import Bodies
from octavo.server.cancel import cancel
from octavo.server.dialect import Dialect, ModelsRoute
from octavo.server.dialects import DIALECTS
from octavo.server.exchange import OTHER, Observer
from octavo.server.exchanges import ExchangeMiddleware, InternalError, RouteLabel, Running
from octavo.server.guard import Access, guarded
from octavo.server.http import error_response, json_response
from octavo.server.metrics import Metrics
from octavo.server.models import ModelRoutes
from octavo.server.registry import Registry
from octavo.server.runner import Handler, Runner, answering
from octavo.server.usage import UsageRoute

encode = msgspec.json.Encoder().encode


class HTTPError(RequestError):
    """What the router refuses."""

    def __init__(self, status: int) -> None:
        texts = {404: "there is no such route", 405: "the route does not take this method"}
        super().__init__(texts.get(status, HTTPStatus(status).phrase))
        self.status = status


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        wrong = InternalError("the server could not answer", code="internal_error")
        return error_response(wrong, request.scope)
    response = error_response(HTTPError(error.status_code), request.scope)
    response.headers.update(error.headers or {})
    return response


class About:
    """Handlers that tell about the server."""

    def __init__(self, registry: Registry, metrics: Metrics) -> None:
        self._registry = registry
        self._metrics = metrics

    async def live(self, request: Request) -> Response:
        return json_response(b'{"status":"live"}')

    async def ready(self, request: Request) -> Response:
        """200 while every model can take requests. Models are counted: names may need a key."""
        ready, draining = self._registry.ready, self._registry.draining
        status = "ready" if ready else "draining" if draining else "not ready"
        states = Counter(entry.state for entry in self._registry)
        body = {"status": status, "models": dict(sorted(states.items()))}
        return json_response(encode(body), 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        text = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self._metrics.render(), media_type=text)

    async def version(self, request: Request) -> Response:
        return json_response(encode({"version": __version__}))


def create_app(
    registry: Registry, metrics: Metrics, access: Access, observe: Observer,
    lora_folder: Path | None = None, dialects: tuple[Dialect, ...] = DIALECTS,
    media: MediaPolicy | None = None,
) -> ASGIApp:  # fmt: skip
    """The ASGI application, which calls `observe` with every exchange that has ended.

    lora_folder: where adapters may be loaded from while serving. media: which images requests may
    have.
    """
    bodies = Bodies()
    runner = Runner(registry, bodies, MediaReader(media))
    about = About(registry, metrics)
    lora = AdapterRoutes(registry, bodies, lora_folder)
    served = ModelRoutes(registry, bodies)
    usage = UsageRoute(access.keyring)
    running: Running = {}
    default = dialects[0]
    table: list[tuple[str, str, Handler, Dialect]] = [
        ("/v1/requests/{id}/cancel", "POST", answering(cancel(running)), default),
        ("/v1/usage", "GET", answering(usage.show), default),
        ("/v1/models/load", "POST", answering(served.load), default),
        ("/v1/models/unload", "POST", answering(served.unload), default),
        ("/v1/load_lora_adapter", "POST", answering(lora.load), default),
        ("/v1/unload_lora_adapter", "POST", answering(lora.unload), default),
        ("/health", "GET", about.ready, default),
        ("/health/ready", "GET", about.ready, default),
        ("/health/live", "GET", about.live, default),
        ("/metrics", "GET", about.metrics, default),
        ("/version", "GET", about.version, default),
    ]
    for dialect in dialects:
        for route in dialect.routes:
            method = "GET" if isinstance(route, ModelsRoute) else "POST"
            table.append((route.path, method, runner.handler(dialect, route), dialect))
    routes, paths = [], {}
    for path, method, handler, dialect in table:
        for spelled in dict.fromkeys((path, path.removeprefix("/v1"))):
            routes.append(Route(spelled, handler, methods=[method]))
            paths[spelled.partition("{")[0]] = RouteLabel(path, dialect.error_body)
    app = Starlette(
        routes=routes, exception_handlers={HTTPException: _http_error, Exception: _http_error}
    )
    return ExchangeMiddleware(
        guarded(app, access), paths, RouteLabel(OTHER, default.error_body), observe, running
    )
