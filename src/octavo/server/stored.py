"""Responses that are kept: made, continued, listed, cancelled and forgotten."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import EngineFailed, InvalidValue, Overloaded, RequestError
from octavo.generate.choices import generate_whole
from octavo.generate.model import ServedModel
from octavo.server.background import Background, to_its_end
from octavo.server.dialect import Dialect, GenerateRoute, KeptWriter, Object, StoredRoute
from octavo.server.endpoint import Endpoint
from octavo.server.exchange import exchange
from octavo.server.exchanges import internal
from octavo.server.guard import principal
from octavo.server.http import ClientGone, ClientMessages, json_response, silence, while_connected
from octavo.server.paging import page
from octavo.server.patience import patient
from octavo.server.runner import Runner, answering
from octavo.server.store import Store, StoredResponse

LOG = logging.getLogger("octavo.server")
encode = msgspec.json.Encoder().encode
MOST_BACKGROUND = 256  # responses that are computed without a client


class StoredResponses:
    """The handlers of a route whose responses are kept unless that is not wanted."""

    def __init__(
        self, runner: Runner, store: Store, background: Background, dialect: Dialect,
        route: StoredRoute,
    ) -> None:  # fmt: skip
        self._runner, self._store, self._background = runner, store, background
        self._dialect, self._route = dialect, route
        lost = EngineFailed("the server was ended before the response was", code="engine_failed")
        for owner, one in store.unfinished():
            store.put(owner, _stored(route.failed(one.fields, lost), one.input))

    def table(self) -> list[Endpoint]:
        path = self._route.path
        entries = [
            (f"{path}/{{id}}", "GET", self.get), (f"{path}/{{id}}", "DELETE", self.delete),
            (f"{path}/{{id}}/cancel", "POST", self.cancel),
            (f"{path}/{{id}}/input_items", "GET", self.input),
        ]  # fmt: skip
        create = patient(answering(self.create), self._dialect.error_event)
        table = [Endpoint(path, "POST", create)]
        return table + [Endpoint(path, method, answering(made)) for path, method, made in entries]

    async def create(self, request: Request) -> Response:
        stored = self._route
        body, served = await self._runner.read(self._dialect, stored.body, request)
        owner = principal(request.scope).salt
        history = await asyncio.to_thread(self._history, owner, body.previous_response_id)
        id, names = stored.prefix + secrets.token_hex(24), stored.names(body)
        route = GenerateRoute(
            stored.path, stored.body, lambda body: stored.request(body, history),
            lambda body, job, usage: stored.writer(body, job, usage, id),
        )  # fmt: skip
        try:
            given = encode(stored.items(body))
            if body.background:
                return await self._begin(route, body, served, request, id, given)

            async def keep(writer: KeptWriter) -> None:
                if body.store is not False:
                    await asyncio.to_thread(self._store.put, owner, _stored(writer.response, given))

            return await self._runner.generate(route, body, served, names, request, keep)
        except RequestError as e:
            raise e.renamed(names) from None

    def _history(self, owner: str, last: str | None) -> list[Object]:
        """What was said in a response and all before it. Raises InvalidValue."""
        return [item for turn in self._store.turns(owner, last) for item in _items(turn)]

    async def _begin(
        self, route: GenerateRoute, body: Any, served: ServedModel, request: Request, id: str,
        given: bytes,
    ) -> Response:  # fmt: skip
        """Starts a response in the background, once it is known to be valid. It is the rest of the
        exchange, whose model it keeps."""
        if len(self._background) >= MOST_BACKGROUND:
            raise Overloaded(
                f"{MOST_BACKGROUND} responses are being made in the background", code="overloaded"
            )
        owner, one = principal(request.scope).salt, exchange(request.scope)
        job, usage = await self._runner.prepare(route, body, served, request)

        async def put(response: Object) -> None:
            kept = asyncio.to_thread(self._store.put, owner, _stored(response, given))
            await to_its_end(kept)  # or it would come back after it is forgotten

        queued = self._route.queued(body, id, served.name, int(time.time()))
        await put(queued)

        async def run() -> None:
            writer = self._route.writer(body, job, usage, id)
            begun = writer.response
            await put(begun)
            try:
                made = generate_whole(job, usage)
                choices = await while_connected(ClientMessages(silence, one), made)
                await asyncio.to_thread(writer.whole, choices)
                done = writer.response
            except ClientGone:  # it is cancelled as a request
                one.status, done = 499, begun | {"status": "cancelled"}
            except RequestError as e:
                one.failed(e)
                done = self._route.failed(writer.response, e.renamed(self._route.names(body)))
            except Exception as e:
                error = internal(e)
                one.failed(error)
                done = self._route.failed(begun, error)
            await put(done)

        one.work = self._background.start(id, run())
        return json_response(encode(queued))

    async def get(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise RequestError("a stored response cannot be streamed", "stream",
                               "unsupported_parameter")  # fmt: skip
        return json_response((await self._find(request)).response)

    async def _find(self, request: Request) -> StoredResponse:
        owner, id = principal(request.scope).salt, request.path_params["id"]
        return await asyncio.to_thread(self._store.get, owner, id)

    async def delete(self, request: Request) -> Response:
        one = await self._find(request)
        await self._background.end(one.id)
        await asyncio.to_thread(self._store.delete, principal(request.scope).salt, one.id)
        return json_response(encode({"id": one.id, "object": "response", "deleted": True}))

    async def cancel(self, request: Request) -> Response:
        """Ends a response in the background; one that has ended stays as it is."""
        one = await self._find(request)
        if not one.fields["background"]:
            raise InvalidValue("only responses in the background can be cancelled", "id")
        if await self._background.end(one.id):
            owner = principal(request.scope).salt
            ended = _stored(one.fields | {"status": "cancelled"}, one.input)
            await asyncio.to_thread(self._store.put, owner, ended)
        return json_response((await self._find(request)).response)

    async def input(self, request: Request) -> Response:
        """The items that a response answers, the latest first."""
        one = await self._find(request)
        items: list[Object] = StoredResponse.decode(one.input)
        return json_response(encode(page(items[::-1], request.query_params)))


def _stored(response: Object, given: bytes) -> StoredResponse:
    return StoredResponse(
        response["id"], response["status"], response["previous_response_id"], given,
        encode(response),
    )  # fmt: skip


def _items(turn: StoredResponse) -> list[Object]:
    """What was said in a turn: its input and its output."""
    said: list[Object] = StoredResponse.decode(turn.input)
    return said + list(turn.fields["output"])
