"""Which handler a request goes to: from a table where its path has no parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from octavo.errors import RequestError
from octavo.server.dialect import Dialect
from octavo.server.endpoint import Endpoint, Handler
from octavo.server.exchanges import InternalError, RouteLabel
from octavo.server.http import error_response


class HTTPError(RequestError):
    """What the router refuses."""

    def __init__(self, status: int) -> None:
        texts = {404: "there is no such route", 405: "the route does not take this method"}
        super().__init__(texts.get(status, HTTPStatus(status).phrase))
        self.status = status


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return error_response(InternalError(), request.scope)
    response = error_response(HTTPError(error.status_code), request.scope)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        routes = [one for one in request.app.routes if isinstance(one, Route)]
        asked = next(one for one in routes if one.matches(request.scope)[0] != Match.NONE)
        same = (one.methods or () for one in routes if one.path == asked.path)
        allowed = sorted(set().union(*same))
        response.headers["allow"] = ", ".join(allowed)
    return response


class RouteTable:
    """The ASGI application of routes, whose errors are written as those of their dialects.

    Starlette matches one route after another, some 90 of them, and puts three layers around each
    part of an answer. Paths without parameters, and without routes that match by more than their
    path, do without.
    """

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        handlers = {HTTPException: _http_error, Exception: _http_error}
        self._app = Starlette(routes=routes, exception_handlers=handlers)
        picky = {r.path for r in routes if isinstance(r, Route) and type(r) is not Route}
        self._exact: dict[tuple[str, str], Handler] = {}
        for one in routes:
            if isinstance(one, Route) and "{" not in one.path and one.path not in picky:
                for method in one.methods or ():
                    self._exact.setdefault((method, one.path), one.endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = scope["type"] == "http"
        handler = self._exact.get((scope["method"], scope["path"])) if known else None
        if handler is None:
            return await self._app(scope, receive, send)
        request = Request(scope, receive, send)
        try:
            response = await handler(request)
        except HTTPException as e:
            response = await _http_error(request, e)
        await response(scope, receive, send)


def routing(
    table: Iterable[tuple[Endpoint, Dialect]],
) -> tuple[list[BaseRoute], dict[str, RouteLabel]]:
    """Routes of endpoints, with and without `/v1`, and what is known of their paths."""
    routes: list[BaseRoute] = []
    paths: dict[str, RouteLabel] = {}
    for one, dialect in table:
        for spelled in dict.fromkeys((one.path, one.path.removeprefix("/v1"))):
            routes.append(Route(spelled, one.handler, methods=[one.method]))
            start, named, end = re.sub(r"\{[^}]*\}", "*", spelled).partition("*")
            label = RouteLabel(one.path, dialect.error_body)
            paths[start + named + end if end else start] = label
    return routes, paths
