"""GET /v1/requests: what runs, for admins."""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.endpoint import Handler
from octavo.server.exchange import Running, exchange
from octavo.server.guard import require_admin
from octavo.server.http import json_response

encode = msgspec.json.Encoder().encode


class InFlight(msgspec.Struct, frozen=True):
    """A request that runs. seconds: since it came."""

    id: str
    route: str
    model: str | None
    seconds: float


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    running: list[InFlight]


def listing(running: Running) -> Handler:
    """The handler, which leaves out the request that asks."""

    async def handler(request: Request) -> Response:
        require_admin(request.scope)
        now, own = time.monotonic(), exchange(request.scope)
        found = [exchange(scope) for each in running.values() for scope in each]
        told = [
            InFlight(one.id, one.route, one.model, round(now - one.began, 6))
            for one in found
            if one is not own
        ]
        return json_response(encode(Requests(running=told)))

    return handler
