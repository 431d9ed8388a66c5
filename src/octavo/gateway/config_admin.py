"""Endpoints of the configuration: what is in force, what was, and another one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import asdict
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from octavo.database import Conflict, DatabaseError
from octavo.errors import DoesNotFit, InvalidValue, UsageError
from octavo.gateway.admin import no_bounds
from octavo.gateway.config import GatewayConfig, convert
from octavo.gateway.control import Control
from octavo.gateway.errors import Unusable
from octavo.gateway.trials import asker
from octavo.server.bodies import Bodies
from octavo.server.endpoint import Endpoint
from octavo.server.guard import require_admin
from octavo.server.http import json_response
from octavo.server.parsing import NOT_JSON, Fields, parse
from octavo.server.runner import answering

encode = msgspec.json.Encoder().encode
DIGITS = 15  # of a version at most, so that every database takes it
T = TypeVar("T")
FLAGS = {"true": True, "1": True, "false": False, "0": False}


class VersionBody(msgspec.Struct, kw_only=True):
    version: Annotated[int, Meta(ge=0, lt=10**DIGITS)]


class ConfigAdmin:
    def __init__(self, control: Control) -> None:
        self._control = control
        self._bodies = Bodies()

    def table(self) -> list[Endpoint]:
        found = [
            Endpoint("/v1/gateway/config", "GET", self.show),
            Endpoint("/v1/gateway/config", "POST", self.change, GatewayConfig),
            Endpoint("/v1/gateway/config/history", "GET", self.history),
            Endpoint("/v1/gateway/config/reload", "POST", self.reload),
            Endpoint("/v1/gateway/config/rollback", "POST", self.rollback, VersionBody),
        ]
        return [Endpoint(e.path, e.method, answering(e.handler), e.body) for e in found]

    async def show(self, request: Request) -> Response:
        """What is in force, or `?version=N` of the history."""
        require_admin(request.scope)
        _check_names(request, "version")
        if (version := _version(request)) is None:
            applied, config = self._control.applied, self._control.config
            about = {} if applied is None else asdict(applied)
            return json_response(encode({**about, "config": config}))
        return json_response(encode({"version": version, "config": await self._kept(version)}))

    async def history(self, request: Request) -> Response:
        """All that are kept, the last first."""
        require_admin(request.scope)
        found = await applied(asyncio.to_thread(self._control.history.latest))
        return json_response(encode({"configs": found}))

    async def change(self, request: Request) -> Response:
        """Puts a configuration in force; `?dry_run=true` only says what it would change.
        `?version=N`: only if that is the version in force, which it was made of."""
        require_admin(request.scope)
        _check_names(request, "dry_run", "version")
        dry_run, made_of = _flag(request, "dry_run"), _version(request)
        async with self._bodies.whole(request) as body:
            try:
                config = convert(msgspec.json.decode(body), GatewayConfig)
            except NOT_JSON:
                raise InvalidValue("the body is not valid JSON in UTF-8") from None
            except UsageError as e:
                raise InvalidValue(str(e)) from None
        work = self._control.apply(config, asker(request), dry_run, made_of)
        return await self._done(work, dry_run)

    async def reload(self, request: Request) -> Response:
        """Reads the file again, as SIGHUP does."""
        require_admin(request.scope)
        _check_names(request)
        return await self._done(self._control.reload(asker(request)))

    async def rollback(self, request: Request) -> Response:
        """Puts one of the history in force again, as a version of its own."""
        require_admin(request.scope)
        _check_names(request)
        async with self._bodies.whole(request) as body:
            version = parse(body, VersionBody, Fields(), lambda _: no_bounds()).version
        config = await self._kept(version)
        return await self._done(self._control.apply(config, asker(request)))

    async def _kept(self, version: int) -> GatewayConfig:
        return await applied(asyncio.to_thread(self._control.history.get, version))

    async def _done(self, work: Awaitable[list[str]], dry_run: bool = False) -> Response:
        lines = await applied(work)
        latest = self._control.applied
        about = {} if dry_run or latest is None else asdict(latest)
        return json_response(encode({"applied": not dry_run, "changes": lines, **about}))


def _check_names(request: Request, *names: str) -> None:
    """Raises InvalidValue for anything else in the query: misspelled, it would be left out, and
    what was only to be tried would be done."""
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in names:
            takes = " and ".join(names) or "nothing"
            raise InvalidValue(f"the query takes {takes}, not {name[:64]!r}", name[:64])
        if given.count(name) > 1:
            raise InvalidValue(f"{name} is in the query {given.count(name)} times", name)


def _flag(request: Request, name: str) -> bool:
    """`?name=true` or `false`, in any case; False if it is not there. Raises InvalidValue."""
    text = request.query_params.get(name, "false")
    if (found := FLAGS.get(text.lower())) is None:
        raise InvalidValue(f"{name} is true, false, 1 or 0, not {text[:64]!r}", name)
    return found


def _version(request: Request) -> int | None:
    """`?version=N`, if it is there. Raises InvalidValue."""
    if (text := request.query_params.get("version")) is None:
        return None
    if not text.isdecimal() or len(text) > DIGITS:
        raise InvalidValue("version is a number of the history", "version")
    return int(text)


async def applied(work: Awaitable[T]) -> T:
    """What comes of work, its errors as a client is told of them."""
    try:
        return await work
    except (Conflict, DatabaseError) as e:
        raise Unusable(f"the configuration stays as it is: {e}") from None
    except (UsageError, DoesNotFit) as e:
        raise InvalidValue(str(e)) from None
