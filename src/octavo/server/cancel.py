"""GET /v1/requests: what is running. POST /v1/requests/{id}/cancel: ends it by its x-request-id."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from octavo.server.endpoint import Handler
from octavo.server.exchange import Exchange, Running, exchange
from octavo.server.guard import Principal, principal
from octavo.server.http import json_response
from octavo.server.registry import NotFound


def _owns(sender: Principal, scope: Scope) -> bool:
    """Requests are their key's, and every admin's."""
    theirs = scope.get("principal")
    return theirs is not None and (sender.admin or theirs.salt == sender.salt)


def _told(one: Exchange, scope: Scope) -> dict[str, object]:
    account = scope["principal"].account
    return {
        "id": one.id, "route": one.route, "model": one.model,
        "key": account.key.name if account is not None else None,
        "seconds": round(time.monotonic() - one.began, 3),
    }  # fmt: skip


def listing(running: Running) -> Handler:
    """The handler: requests of the same key that compute something, an admin's call tells all."""

    async def handler(request: Request) -> Response:
        sender = principal(request.scope)
        scopes = [s for each in running.values() for s in each if _owns(sender, s)]
        found = [_told(exchange(s), s) for s in scopes if exchange(s).model is not None]
        found.sort(key=lambda one: one["seconds"], reverse=True)  # type: ignore[arg-type,return-value]
        return json_response(msgspec.json.encode({"object": "list", "data": found}))

    return handler


def cancel(running: Running) -> Handler:
    """The handler: requests of the same key are ended, an admin's call ends anybody's."""

    async def handler(request: Request) -> Response:
        sender, found = principal(request.scope), 0
        for scope in running.get(request.path_params["id"], ()):
            if _owns(sender, scope) and scope is not request.scope:
                exchange(scope).cancelled.set()
                found += 1
        if not found:
            raise NotFound("no request with this id is running", "id", "request_not_found")
        return json_response(b'{"status":"cancelled"}')

    return handler
