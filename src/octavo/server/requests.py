"""GET /v1/requests: what runs, what ran last, and what was slow, for admins."""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.exchange import Exchange, exchange
from octavo.server.guard import require_admin
from octavo.server.http import json_response
from octavo.server.memory_spikes import MEMORY_CAUSES, MemorySpike
from octavo.server.registry import NotFound
from octavo.server.timelines import CAUSES, Timeline, Timelines

Phase = Literal["receive", "queue", "prefill", "decode"]
encode = msgspec.json.Encoder().encode


class InFlight(msgspec.Struct, frozen=True, kw_only=True):
    """A request that runs. seconds: since it came. phase: what it is at."""

    id: str
    route: str
    model: str | None
    seconds: float
    phase: Phase
    prompt_tokens: int
    completion_tokens: int


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """causes: what the words mean that say why a request was slow; memory_causes: why a process
    grew."""

    object: Literal["list"] = "list"
    running: list[InFlight]
    recent: list[Timeline]
    worst: list[Timeline]
    spikes: list[MemorySpike]
    causes: dict[str, str]
    memory_causes: dict[str, str]


def in_flight(one: Exchange, now: float) -> InFlight:
    """How far a request is."""
    usage = one.usage
    phase: Phase = "receive"
    if usage is not None and usage.submitted is not None:
        phase = "decode" if usage.first else "prefill" if usage.admitted else "queue"
    return InFlight(
        id=one.id, route=one.route, model=one.model, seconds=round(now - one.began, 6), phase=phase,
        prompt_tokens=usage.prompt if usage else 0,
        completion_tokens=usage.completion if usage else 0,
    )  # fmt: skip


class RequestRoutes:
    """Handlers that tell of requests, by numbers and names; contents are kept nowhere."""

    def __init__(self, timelines: Timelines) -> None:
        self._timelines = timelines

    async def list(self, request: Request) -> Response:
        require_admin(request.scope)
        now, own = time.monotonic(), exchange(request.scope)
        scopes = [scope for each in self._timelines.running.values() for scope in each]
        running = [in_flight(one, now) for one in map(exchange, scopes) if one is not own]
        recent, worst = [*self._timelines.recent][::-1], self._timelines.worst
        told = Requests(
            running=running, recent=recent, worst=worst, spikes=[*self._timelines.spikes][::-1],
            causes=CAUSES, memory_causes=MEMORY_CAUSES,
        )  # fmt: skip
        return json_response(encode(told))

    async def show(self, request: Request) -> Response:
        """The latest time line of a request by its x-request-id."""
        require_admin(request.scope)
        id, lines = request.path_params["id"], self._timelines
        for line in (*reversed(lines.recent), *lines.worst):
            if line.id == id:
                return json_response(encode(line))
        raise NotFound("no request with this id has ended lately", "id", "request_not_found")
