"""Responses that are kept: made, continued, listed, cancelled and forgotten."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import EngineFailed, InvalidValue, Overloaded, RequestError
from octavo.generate.choices import generate_whole
from octavo.generate.reply import Usage
from octavo.server.dialect import Dialect, GenerateRoute, KeptWriter, Object, StoredRoute
from octavo.server.guard import Principal, principal
from octavo.server.http import json_response
from octavo.server.registry import Lease
from octavo.server.runner import Handler, Runner, answering, reserve
from octavo.server.store import Store, Stored

encode = msgspec.json.Encoder().encode
MOST_BACKGROUND = 256  # responses that are computed without a client
MOST_LISTED = 100


class StoredResponses:
    """The handlers of a route whose responses are kept unless that is not wanted."""

    def __init__(self, runner: Runner, store: Store, dialect: Dialect, route: StoredRoute) -> None:
        self._runner, self._store = runner, store
        self._dialect, self._route = dialect, route
        self._running: dict[str, asyncio.Task[None]] = {}  # in the background, by id
        lost = EngineFailed("the server was ended before the response was", code="engine_failed")
        for owner, one in store.unfinished():
            store.put(owner, _stored(route.failed(one.fields, lost), one.input))

    def table(self) -> list[tuple[str, str, Handler]]:
        """The handlers by path and method."""
        path = self._route.path
        entries = [
            (path, "POST", self.create), (f"{path}/{{id}}", "GET", self.get),
            (f"{path}/{{id}}", "DELETE", self.delete),
            (f"{path}/{{id}}/cancel", "POST", self.cancel),
            (f"{path}/{{id}}/input_items", "GET", self.input),
        ]  # fmt: skip
        return [(path, method, answering(handler)) for path, method, handler in entries]

    async def create(self, request: Request) -> Response:
        stored = self._route
        body, lease = await self._runner.read(self._dialect, stored.body, request)
        served = lease.model
        owner = principal(request.scope).salt
        turns = await asyncio.to_thread(self._store.turns, owner, body.previous_response_id)
        history = [item for turn in turns for item in _items(turn)]
        id, names = stored.prefix + secrets.token_hex(24), stored.names(body)
        route = GenerateRoute(
            stored.path, stored.body, lambda body: stored.request(body, history),
            lambda body, job, usage: stored.writer(body, job, usage, id),
        )  # fmt: skip
        try:
            given = encode(stored.items(body))
            if body.background:
                return await self._begin(route, body, lease, principal(request.scope), id, given)

            async def keep(writer: KeptWriter) -> None:
                if body.store is not False:
                    await asyncio.to_thread(self._store.put, owner, _stored(writer.response, given))

            return await self._runner.generate(route, body, served, names, request, keep)
        except RequestError as e:
            raise e.renamed(names) from None

    async def _begin(
        self, route: GenerateRoute, body: Any, lease: Lease, sender: Principal, id: str,
        given: bytes,
    ) -> Response:  # fmt: skip
        """Starts a response in the background, once it is known to be valid."""
        if len(self._running) >= MOST_BACKGROUND:
            raise Overloaded(
                f"{MOST_BACKGROUND} responses are being made in the background", code="overloaded"
            )
        served, owner = lease.model, sender.salt
        job = await self._runner.prepare(route.request, body, served, owner)
        usage, at_end = Usage(prompt=job.prompt_tokens), list[Callable[[], None]]()
        reserve(sender, usage, job.params.max_tokens, at_end)
        queued = self._route.queued(body, id, served.name, int(time.time()))
        await asyncio.to_thread(self._store.put, owner, _stored(queued, given))

        async def run() -> None:
            writer = self._route.writer(body, job, usage, id)
            begun = _stored(writer.response, given)
            await asyncio.to_thread(self._store.put, owner, begun)
            try:
                choices = await generate_whole(job, usage)
                await asyncio.to_thread(writer.whole, choices)
                done = writer.response
            except RequestError as e:
                done = self._route.failed(writer.response, e.renamed(self._route.names(body)))
            await asyncio.to_thread(self._store.put, owner, _stored(done, given))

        task = self._running[id] = asyncio.create_task(run())
        task.add_done_callback(lambda _: self._running.pop(id, None))
        own = Lease(lease.entry, lease.name)  # the request's ends with it
        own.grant()
        for end in (own.release, *at_end):
            task.add_done_callback(lambda _, end=end: end())  # type: ignore[misc]
        return json_response(encode(queued))

    async def get(self, request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            raise RequestError("a stored response cannot be streamed", "stream",
                               "unsupported_parameter")  # fmt: skip
        return json_response((await self._find(request)).response)

    async def _find(self, request: Request) -> Stored:
        owner, id = principal(request.scope).salt, request.path_params["id"]
        return await asyncio.to_thread(self._store.get, owner, id)

    async def delete(self, request: Request) -> Response:
        one = await self._find(request)
        await self._end(one.id)
        await asyncio.to_thread(self._store.delete, principal(request.scope).salt, one.id)
        return json_response(encode({"id": one.id, "object": "response", "deleted": True}))

    async def cancel(self, request: Request) -> Response:
        """Ends a response in the background; one that has ended stays as it is."""
        one = await self._find(request)
        if not one.fields["background"]:
            raise InvalidValue("only responses in the background can be cancelled", "id")
        if await self._end(one.id):
            owner = principal(request.scope).salt
            ended = _stored(one.fields | {"status": "cancelled"}, one.input)
            await asyncio.to_thread(self._store.put, owner, ended)
        return json_response((await self._find(request)).response)

    async def _end(self, id: str) -> bool:
        """Whether a response was still being made."""
        if (task := self._running.get(id)) is None:
            return False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    async def input(self, request: Request) -> Response:
        """The items that a response answers, the latest first."""
        one = await self._find(request)
        items: list[Object] = Stored.decode(one.input)
        query = request.query_params
        limit = query.get("limit", "20")
        if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MOST_LISTED:
            raise InvalidValue(f"limit is a number from 1 to {MOST_LISTED}", "limit")
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidValue("order is asc or desc", "order")
        items = items if order == "asc" else items[::-1]
        ids = [item["id"] for item in items]
        if (after := query.get("after")) is not None:
            if after not in ids:
                raise InvalidValue("after is no item of this response", "after")
            items = items[ids.index(after) + 1 :]
        shown = items[: int(limit)]
        listed = {
            "object": "list", "data": shown, "has_more": len(shown) < len(items),
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
        }  # fmt: skip
        return json_response(encode(listed))

    async def close(self) -> None:
        """Ends what runs in the background."""
        for id in list(self._running):
            await self._end(id)


def _stored(response: Object, given: bytes) -> Stored:
    return Stored(
        response["id"], response["status"], response["previous_response_id"], given,
        encode(response),
    )  # fmt: skip


def _items(turn: Stored) -> list[Object]:
    """What was said in a turn: its input and its output."""
    said: list[Object] = Stored.decode(turn.input)
    return said + list(turn.fields["output"])
