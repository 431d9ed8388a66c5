"""Endpoints for admins: the upstreams, what changes them, and why a request goes where it goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidValue, UsageError
from octavo.gateway.admission import UpstreamQueue
from octavo.gateway.body import Relayed, read_outline
from octavo.gateway.health import Health
from octavo.gateway.relay import Relay
from octavo.gateway.traffic import SESSION, units_of
from octavo.gateway.upstream import Upstream, parse_place
from octavo.gateway.upstreams import Upstreams
from octavo.server.bodies import Bodies
from octavo.server.endpoint import Endpoint
from octavo.server.exchange import exchange
from octavo.server.guard import principal, require_admin
from octavo.server.http import json_response
from octavo.server.parsing import Fields, parse
from octavo.server.registry import NotFound
from octavo.server.runner import answering

encode = msgspec.json.Encoder().encode


class AddBody(msgspec.Struct, kw_only=True):
    """upstream: [POOL=]URL. key: that it wants to see."""

    upstream: str
    key: str | None = None


class NameBody(msgspec.Struct, kw_only=True):
    upstream: str


class Admin:
    """Handlers that show upstreams and change them. keys: that upstreams of pools want to see, and
    by None those of all others."""

    def __init__(
        self, upstreams: Upstreams, health: Health, relay: Relay, admission: UpstreamQueue
    ) -> None:
        self._upstreams, self._health, self._relay = upstreams, health, relay
        self._admission = admission
        self.keys: Mapping[str | None, str | None] = {None: None}
        self._bodies = Bodies()

    def table(self) -> list[Endpoint]:
        found = [
            Endpoint("/v1/upstreams", "GET", self.show),
            Endpoint("/v1/upstreams", "POST", self.add, AddBody),
            Endpoint("/v1/upstreams/drain", "POST", self.drain, NameBody),
            Endpoint("/v1/upstreams/resume", "POST", self.resume, NameBody),
            Endpoint("/v1/upstreams/remove", "POST", self.remove, NameBody),
            Endpoint("/v1/route/explain", "POST", self.explain),
        ]
        return [Endpoint(e.path, e.method, answering(e.handler), e.body) for e in found]

    async def show(self, request: Request) -> Response:
        """Every upstream and what is known of it."""
        require_admin(request.scope)
        return self._shown(list(self._upstreams))

    async def add(self, request: Request) -> Response:
        body = await self._read(request, AddBody)
        try:
            place = parse_place(body.upstream)
        except UsageError as e:
            raise InvalidValue(str(e).replace("--upstream", "upstream"), "upstream") from None
        key = body.key or self.keys.get(place.pool, self.keys[None])
        return self._shown([self._health.add(replace(place, key=key))])

    async def drain(self, request: Request) -> Response:
        """An upstream gets nothing new."""
        upstream = self._named(await self._read(request, NameBody))
        self._upstreams.drain(upstream)
        return self._shown([upstream])

    async def resume(self, request: Request) -> Response:
        """A drained upstream gets requests again, once it has answered."""
        upstream = self._named(await self._read(request, NameBody))
        return self._shown([self._health.add(upstream.place)])

    async def remove(self, request: Request) -> Response:
        """An upstream is gone at once; its streams go on elsewhere where they can."""
        upstream = self._named(await self._read(request, NameBody))
        self._health.remove(upstream)
        return self._shown([upstream])

    async def explain(self, request: Request) -> Response:
        """Where a body would go, and what it would cost everywhere, in milliseconds."""
        require_admin(request.scope)
        async with self._bodies.whole(request) as body:
            outline = read_outline(body)
        outline.model = outline.model or self._admission.only_model
        salt = principal(request.scope).salt
        session = request.headers.get(SESSION, "")
        asked = Relayed("", "", body, outline, salt, session)
        sender, one = principal(request.scope), exchange(request.scope)
        units = units_of(request.headers, outline, sender, one)
        dealt = self._relay.traffic.deal(outline.model, units)
        pool = dealt.pools[0]
        found = self._upstreams.explain(pool, outline.model, asked.ask)
        reply = {
            "model": outline.model, "version": dealt.version, "pool": pool,
            "prompt_tokens": asked.ask.tokens, "candidates": [asdict(c) for c in found],
        }  # fmt: skip
        return json_response(encode(reply))

    async def _read(self, request: Request, kind: type[Any]) -> Any:
        require_admin(request.scope)
        async with self._bodies.whole(request) as body:
            return parse(body, kind, Fields(), lambda _: no_bounds())

    def _named(self, body: NameBody) -> Upstream:
        name = body.upstream.partition("://")[2] or body.upstream
        if (upstream := self._upstreams.get(name)) is None:
            known = ", ".join(sorted(u.id for u in self._upstreams)[:8]) or "none"
            raise NotFound(f"no upstream {name[:64]!r}; there are: {known}", "upstream")
        return upstream

    def _shown(self, upstreams: list[Upstream]) -> Response:
        return json_response(encode({"upstreams": [_card(u) for u in upstreams]}))


def no_bounds() -> Any:
    raise InvalidValue("the body is longer than any of these bodies needs to be")


def _card(up: Upstream) -> dict[str, Any]:
    return {
        "id": up.id, "url": up.place.url, "pool": up.place.pool, "state": up.state,
        "reason": up.reason, "models": up.models, "resumable": up.own, "running": up.running,
        "waiting": up.waiting, "waiting_tokens": up.waiting_tokens, "breaker": up.breaker.state,
        "tells_cache": up.cache.tells, "times": up.times,
        "prompt_token_seconds": up.prompt_token, "step_seconds": up.step,
    }  # fmt: skip
