"""POST /v1/requests/{id}/cancel: ends a request by its x-request-id."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.endpoint import Handler
from octavo.server.exchange import Running, exchange
from octavo.server.guard import principal
from octavo.server.http import json_response
from octavo.server.registry import NotFound


def cancel(running: Running) -> Handler:
    """The handler: requests of the same key are ended, an admin's call ends anybody's."""

    async def handler(request: Request) -> Response:
        sender, found = principal(request.scope), 0
        for scope in running.get(request.path_params["id"], ()):
            theirs = scope.get("principal")
            own = theirs is not None and (sender.admin or theirs.salt == sender.salt)
            if own and scope is not request.scope:
                exchange(scope).cancel()
                found += 1
        if not found:
            raise NotFound("no request with this id is running", "id", "request_not_found")
        return json_response(b'{"status":"cancelled"}')

    return handler
