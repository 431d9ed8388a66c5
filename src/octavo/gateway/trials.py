"""Endpoints of releases and experiments: for admins, but that anybody may give feedback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import wraps
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from octavo.database import DatabaseError
from octavo.errors import InvalidValue, UsageError
from octavo.experiments import report
from octavo.experiments import spec as experiment_spec
from octavo.experiments.controller import Experiments
from octavo.experiments.spec import Unit
from octavo.gateway.admin import no_bounds
from octavo.gateway.errors import Unusable
from octavo.gateway.traffic import SESSION, UNIT, Traffic
from octavo.gateway.trial_pools import check_canary, check_experiment, check_release
from octavo.gateway.upstreams import Upstreams
from octavo.release import spec as release_spec
from octavo.release.controller import Releases, Status
from octavo.release.machine import ENDED, Action
from octavo.release.store import Release
from octavo.server.bodies import Bodies
from octavo.server.endpoint import Endpoint, Handler
from octavo.server.guard import principal, require_admin
from octavo.server.http import json_response
from octavo.server.parsing import NOT_JSON, Fields, parse
from octavo.server.runner import answering

encode = msgspec.json.Encoder().encode
Spec = TypeVar("Spec")


class ModelBody(msgspec.Struct, kw_only=True):
    model: str


class ShadowBody(msgspec.Struct, kw_only=True):
    """kl: of answers of the old version that the canary was shown, nats a token."""

    model: str
    kl: Annotated[list[Annotated[float, Meta(ge=0, le=1e12)]], Meta(max_length=4096)]


class SharesBody(msgspec.Struct, kw_only=True):
    """weights: of variants, in percent; those that are not named keep theirs."""

    weights: dict[str, float]


class FeedbackBody(msgspec.Struct, kw_only=True):
    """unit: as the header of the request had it; or the same user or session."""

    experiment: str
    metric: str
    value: Annotated[float, Meta(ge=-1e12, le=1e12)]  # sums of squares stay numbers
    unit: str = ""
    user: str = ""
    session: str = ""


class Trials:
    """Handlers that start, show and end releases and experiments."""

    def __init__(
        self, releases: Releases, experiments: Experiments, upstreams: Upstreams, traffic: Traffic
    ) -> None:
        self._upstreams, self._traffic = upstreams, traffic
        self._releases, self._experiments = releases, experiments
        self._bodies = Bodies()

    def table(self) -> list[Endpoint]:
        found = [
            Endpoint("/v1/releases", "GET", self.releases),
            Endpoint("/v1/releases", "POST", self.start_release),
            Endpoint("/v1/releases/shadow", "POST", self.shadow, ShadowBody),
            Endpoint("/v1/releases/{action}", "POST", self.act, ModelBody),
            Endpoint("/v1/experiments", "GET", self.experiments),
            Endpoint("/v1/experiments", "POST", self.start_experiment),
            Endpoint("/v1/experiments/{id}/report", "GET", self.report),
            Endpoint("/v1/experiments/{id}/shares", "POST", self.shares, SharesBody),
            Endpoint("/v1/experiments/{id}/stop", "POST", self.stop),
            Endpoint("/v1/feedback", "POST", self.feedback, FeedbackBody),
        ]
        return [Endpoint(e.path, e.method, with_database(e.handler), e.body) for e in found]

    # -- releases -----------------------------------------------------------------------------

    async def releases(self, request: Request) -> Response:
        """The last release of each model, or of the one in the query, with what was seen of it."""
        require_admin(request.scope)
        if model := request.query_params.get("model"):
            return _said(_status(await asyncio.to_thread(self._releases.status, model)))
        latest = await asyncio.to_thread(self._releases.latest)
        return _said({"releases": [card(one) for one in latest.values()]})

    async def start_release(self, request: Request) -> Response:
        spec = await self._spec(request, release_spec.convert)
        if not spec.stable:
            stable = self._traffic.serving(spec.model, await self._last(spec.model))
            with _refusing():
                spec = msgspec.structs.replace(spec, stable=stable).check()
        check_release(self._upstreams, spec)
        release = await asyncio.to_thread(self._releases.start, spec, asker(request))
        await _in_force(self._releases)
        return _said(card(release) | {"spec": release.spec})

    async def _last(self, model: str) -> Release | None:
        """The last release of a model, as the database has it."""
        return (await asyncio.to_thread(self._releases.latest)).get(model)

    async def act(self, request: Request) -> Response:
        """Promotes, finishes, pauses, resumes or rolls back."""
        body, action = await self._read(request, ModelBody), request.path_params["action"]
        if action not in get_args(Action):
            raise InvalidValue(f"action is one of {', '.join(get_args(Action))}", "action")
        who, last = asker(request), await self._last(body.model)
        if action in ("promote", "finish") and last and last.state.phase not in ENDED:
            check_canary(self._upstreams, last.spec)
        done = await asyncio.to_thread(self._releases.act, body.model, action, who)
        await _in_force(self._releases)
        return _said(card(done))

    async def shadow(self, request: Request) -> Response:
        body = await self._read(request, ShadowBody)
        self._releases.shadow(body.model, body.kl)
        return _said({"model": body.model, "counted": len(body.kl)})

    # -- experiments --------------------------------------------------------------------------

    async def experiments(self, request: Request) -> Response:
        require_admin(request.scope)
        found = await asyncio.to_thread(self._experiments.all)
        return _said({"experiments": [
            {"id": e.spec.id, "created": e.created, "ended": e.ended, "spec": e.spec} for e in found
        ]})  # fmt: skip

    async def start_experiment(self, request: Request) -> Response:
        spec = await self._spec(request, experiment_spec.convert)
        check_experiment(self._upstreams, spec)
        await asyncio.to_thread(self._experiments.start, spec, asker(request))
        await _in_force(self._experiments)
        return _said({"id": spec.id, "started": True})

    async def report(self, request: Request) -> Response:
        """What the experiment says; `?format=html` as a page."""
        require_admin(request.scope)
        id, html = request.path_params["id"], request.query_params.get("format") == "html"

        def make() -> bytes:
            one, totals, found = self._experiments.report(id)
            if html:
                return report.page(one.spec, totals, found)
            unsound = found.mismatch.found
            return encode({
                "id": id, "mismatch": {"found": unsound, **asdict(found.mismatch)},
                "moved": found.moved, "waiting": found.waiting,
                "comparisons": [] if unsound else [
                    {**asdict(c), "decided": c.decided} for c in found.comparisons
                ],
            })  # fmt: skip

        made = await asyncio.to_thread(make)
        return (
            Response(made, media_type="text/html; charset=utf-8") if html else json_response(made)
        )

    async def shares(self, request: Request) -> Response:
        body, id = await self._read(request, SharesBody), request.path_params["id"]
        shares = {name: weight / 100 for name, weight in body.weights.items()}
        with _refusing("weights"):
            await asyncio.to_thread(self._experiments.change_shares, id, shares, asker(request))
        await _in_force(self._experiments)
        return _said({"id": id, "weights": body.weights})

    async def stop(self, request: Request) -> Response:
        require_admin(request.scope)
        id = request.path_params["id"]
        await asyncio.to_thread(self._experiments.stop, id, asker(request))
        await _in_force(self._experiments)
        return _said({"id": id, "ended": True})

    async def feedback(self, request: Request) -> Response:
        """A value of a metric that only the one who asked can tell, like thumbs up."""
        async with self._bodies.whole(request) as data:
            body = parse(data, FeedbackBody, Fields(), lambda _: no_bounds())
        units: dict[Unit, str] = {
            "header": body.unit or request.headers.get(UNIT, ""), "user": body.user,
            "session": body.session or request.headers.get(SESSION, ""),
            "key": principal(request.scope).salt,
        }  # fmt: skip
        self._experiments.feedback(body.experiment, body.metric, body.value, units)
        return _said({"experiment": body.experiment, "counted": True})

    # -- bodies -------------------------------------------------------------------------------

    async def _read(self, request: Request, kind: type[Any]) -> Any:
        require_admin(request.scope)
        async with self._bodies.whole(request) as data:
            return parse(data, kind, Fields(), lambda _: no_bounds())

    async def _spec(self, request: Request, convert: Callable[[Any], Spec]) -> Spec:
        """What a body describes. Raises RequestError."""
        require_admin(request.scope)
        async with self._bodies.whole(request) as data:
            with _refusing():
                try:
                    return convert(msgspec.json.decode(data))
                except NOT_JSON:
                    raise InvalidValue("the body is not valid JSON in UTF-8") from None


async def _in_force(trials: Releases | Experiments) -> None:
    """What was just written holds at this gateway before its sender hears of it; if the database
    has gone away since, once that is back."""
    with suppress(DatabaseError):
        await trials.refresh()


@contextmanager
def _refusing(param: str | None = None) -> Iterator[None]:
    """What is wrong with what was asked for is told to who asks."""
    try:
        yield
    except UsageError as e:
        raise InvalidValue(str(e), param) from None


def with_database(handler: Handler) -> Handler:
    """A handler that uses the database; who asks is told if that is away."""

    @wraps(handler)
    async def wrapped(request: Request) -> Response:
        try:
            return await handler(request)
        except DatabaseError as e:
            raise Unusable(str(e)) from None

    return answering(wrapped)


def asker(request: Request) -> str:
    """The name of who asks, as records have it."""
    account = principal(request.scope).account
    return "admin" if account is None else account.key.name


def _said(value: Any) -> Response:
    return json_response(encode(value))


def card(one: Any) -> dict[str, Any]:
    return {"id": one.id, "model": one.spec.model, "created": one.created, **asdict(one.state)}


def _status(status: Status) -> dict[str, Any]:
    return card(status.release) | {
        "spec": status.release.spec, "shares": status.shares, "audit": status.trail,
        "requests": {"canary": status.seen.canary, "baseline": status.seen.other},
        "guards": [
            {"guard": r.title, "evidence": r.evidence, "needed": r.needed, "fired": r.fired,
             "watched": r.watched, **asdict(r.figures)}
            for r in status.seen.readings
        ],
    }  # fmt: skip
