"""POST /v1/profile: what a server does for some seconds, as a trace, for admins."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.client.process import EngineProcessClient
from octavo.engine.profile import Profile
from octavo.errors import InvalidValue
from octavo.generate.profile import Profiling
from octavo.generate.trace import trace_file
from octavo.server.bodies import Bodies
from octavo.server.guard import require_admin
from octavo.server.http import json_response, while_connected
from octavo.server.models import leased
from octavo.server.parsing import Fields
from octavo.server.registry import Registry

LONGEST = 60.0
encode = msgspec.json.Encoder().encode


class ProfileBody(msgspec.Struct, kw_only=True):
    """seconds: how long. model: whose engines; it may be left out where one is served."""

    seconds: float = 5.0
    model: str | None = None


class ProfileRoute:
    """The handler of /v1/profile."""

    def __init__(self, registry: Registry, bodies: Bodies) -> None:
        self._registry = registry
        self._bodies = bodies
        self._profiling = Profiling()

    async def record(self, request: Request) -> Response:
        """Answers with the trace after so many seconds; sooner if the client is gone."""
        from octavo.client.replicas import engines  # not before somebody asks

        require_admin(request.scope)
        body = await self._bodies.read(request, ProfileBody, Fields(), self._registry.bounds)
        if not 0.1 <= body.seconds <= LONGEST:
            raise InvalidValue(f"seconds is between 0.1 and {LONGEST:g}", "seconds")
        lease = await leased(request, self._registry, body.model)
        found = engines(lease.model.client)
        able = {n: c for n, c in found.items() if isinstance(c, EngineProcessClient)}
        record = self._profiling.record(able, lambda: asyncio.sleep(body.seconds))
        profiles = await while_connected(request.receive, record)
        return json_response(await asyncio.to_thread(_written, profiles))


def _written(profiles: list[Profile]) -> bytes:
    return encode(trace_file(profiles))
