"""GET /v1/usage: what keys have used."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.database import DatabaseError
from octavo.errors import InvalidValue, Overloaded, RequestError
from octavo.server.guard import principal
from octavo.server.http import json_response
from octavo.server.keyring import Keyring

MOST_DAYS = 3660
QUERY = {"days": {"type": "integer", "minimum": 1, "maximum": MOST_DAYS}}
encode = msgspec.json.Encoder().encode


class UsageRoute:
    """A key sees what it has used itself, an admin what all have. keyring: None without keys."""

    def __init__(self, keyring: Keyring | None) -> None:
        self._keyring = keyring

    async def show(self, request: Request) -> Response:
        if (ring := self._keyring) is None:
            raise RequestError("usage is recorded with --keys only", None, "unsupported_parameter")
        days = request.query_params.get("days", "30")
        if not days.isdecimal() or len(days) > 4 or not 1 <= int(days) <= MOST_DAYS:
            raise InvalidValue(f"days is a number between 1 and {MOST_DAYS}", "days")
        sender = principal(request.scope)
        key = None if sender.admin else sender.account.key.name if sender.account else ""
        await asyncio.to_thread(ring.save)
        try:
            found = await asyncio.to_thread(ring.store.usage, int(days), key)
        except DatabaseError:  # the log says why
            raise Overloaded("what keys have used cannot be read now") from None
        return json_response(encode({"object": "list", "data": found}))
