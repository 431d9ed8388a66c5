"""Routes of responses, which the upstream that made them keeps: what continues one goes there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import TypeVar
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.database import DatabaseError
from octavo.gateway.answers import STREAMS, failure
from octavo.gateway.body import RESPONSES
from octavo.gateway.deadline import Deadline
from octavo.gateway.errors import NOT_FOUND, KeeperGone, NoUpstream, UpstreamFailed
from octavo.gateway.headers import back, onward, with_key
from octavo.gateway.health import Health
from octavo.gateway.kept import KeptResponses
from octavo.gateway.relay import Relay
from octavo.gateway.transport import Answer, Transport
from octavo.gateway.upstream import Upstream
from octavo.gateway.upstreams import Upstreams
from octavo.server.endpoint import Endpoint, Handler
from octavo.server.exchange import exchange
from octavo.server.guard import principal
from octavo.server.http import EventStream, started, while_connected
from octavo.server.parsing import NOT_JSON
from octavo.server.runner import answering
from octavo.server.store import NotStored

LOG = logging.getLogger("octavo.gateway")
T = TypeVar("T")


class _Made(msgspec.Struct):
    id: str
    store: bool | None = None


class _Event(msgspec.Struct):
    response: _Made


class Responses:
    """The handlers. check_open: raises Overloaded once nothing new is taken."""

    def __init__(
        self, kept: KeptResponses, relay: Relay, upstreams: Upstreams, transport: Transport,
        health: Health, check_open: Callable[[], None],
    ) -> None:  # fmt: skip
        self._kept, self._relay, self._upstreams = kept, relay, upstreams
        self._transport, self._health, self._check_open = transport, health, check_open

    def table(self) -> list[Endpoint]:
        one = f"{RESPONSES}/{{id}}"
        entries: list[tuple[str, str, Handler]] = [
            (RESPONSES, "POST", self.create), (one, "DELETE", self.delete),
            (one, "GET", self.pass_on),
            (f"{one}/cancel", "POST", partial(self.pass_on, rest="/cancel")),
            (f"{one}/input_items", "GET", partial(self.pass_on, rest="/input_items")),
        ]  # fmt: skip
        return [Endpoint(path, method, answering(handler)) for path, method, handler in entries]

    async def create(self, request: Request) -> Response:
        """A new one, from the upstream that keeps what it follows, if it follows any."""
        self._check_open()
        owner = principal(request.scope).salt
        made = await self._relay.answer(request, RESPONSES, partial(self._keeper, owner))
        note = partial(self._note, owner, made.headers.get("x-replica", ""))
        if isinstance(made, EventStream):
            made.frames = await started(_noted(made.frames, note))
        elif made.status_code == 200:
            await note(bytes(made.body))
        return made

    async def pass_on(self, request: Request, rest: str = "") -> Response:
        """What its keeper says to a request about one. rest: of the path."""
        owner, id = principal(request.scope).salt, request.path_params["id"]
        upstream = await self._keeper(owner, id)
        query = f"?{request.url.query}" if request.url.query else ""
        path = f"{RESPONSES}/{quote(id, safe='')}{rest}{query}"
        return await while_connected(request.receive, self._ask(request, upstream, path))

    async def delete(self, request: Request) -> Response:
        reply = await self.pass_on(request)
        if reply.status_code == 200:
            await _said(asyncio.to_thread(self._kept.forget, request.path_params["id"]))
        return reply

    async def _keeper(self, owner: str, id: str) -> Upstream:
        """Who keeps a response. Raises NotStored, KeeperGone, NoUpstream."""
        name = await _said(asyncio.to_thread(self._kept.find, id, owner))
        if name is None:
            raise NotStored(f"no response {id[:64]!r} is stored", "id", NOT_FOUND)
        if (upstream := self._upstreams.get(name)) is None:
            raise KeeperGone(name)
        if upstream.state == "down":
            text = f"upstream {name}, which keeps this response, does not answer"
            raise NoUpstream(text, "no_upstream", 2.0)
        return upstream

    async def _note(self, owner: str, upstream: str, data: bytes) -> bool:
        """Remembers who keeps the response that bytes are of, once they say which. Whether it was
        found in them."""
        try:
            made = _made(data)
        except NOT_JSON:
            return False
        if made.store is not False:
            try:
                await asyncio.to_thread(self._kept.put, made.id, owner, upstream)
            except DatabaseError as e:
                LOG.warning("a response will not be found again: %s", e)
        return True

    async def _ask(self, request: Request, upstream: Upstream, path: str) -> Response:
        """The answer of an upstream to a request without a body. Raises UpstreamFailed."""
        id = exchange(request.scope).id
        headers = with_key(onward(request.headers, id, self._relay.guarded), upstream)
        timeouts = self._transport.timeouts
        try:
            async with Deadline(upstream, timeouts.first):
                answer = await self._transport.open(
                    upstream, path, headers, b"", timeouts.foreign, request.method
                )
                upstream.cut.add(answer.cut)
            if answer.status == 200 and answer.media_type in STREAMS:
                kind = answer.headers["content-type"]
                return EventStream(await started(self._frames(request, upstream, answer)), kind)
            try:
                body = await answer.whole()
            finally:
                _leave(upstream, answer)
        except UpstreamFailed:
            self._health.look(upstream)
            raise
        headers = back(answer.headers, upstream)
        return Response(body, answer.status, headers, answer.headers.get("content-type"))

    async def _frames(
        self, request: Request, upstream: Upstream, answer: Answer
    ) -> AsyncGenerator[bytes, None]:
        """The bytes of a stream."""
        try:
            yield b""
            while data := await answer.read():
                yield data
        except UpstreamFailed as e:
            self._health.look(upstream)
            exchange(request.scope).failed(e)
            yield failure(RESPONSES, e)
        finally:
            _leave(upstream, answer)


def _leave(upstream: Upstream, answer: Answer) -> None:
    upstream.cut.discard(answer.cut)
    answer.close()


def _made(data: bytes) -> _Made:
    """The response that a body, or the events of a stream, tell of. Raises NOT_JSON."""
    if data[:1] == b"{":
        return msgspec.json.decode(data, type=_Made)
    event = data.partition(b"data:")[2].partition(b"\n")[0]
    return msgspec.json.decode(event, type=_Event).response


async def _noted(
    frames: AsyncGenerator[bytes, None], note: Callable[[bytes], Awaitable[bool]]
) -> AsyncGenerator[bytes, None]:
    """A stream, of which it is noted who keeps it before its client hears of it."""
    known = False
    async with aclosing(frames) as rest:
        yield b""
        async for frame in rest:
            known = known or await note(frame)
            yield frame


async def _said(work: Awaitable[T]) -> T:
    """What the database says. Raises NoUpstream if it is away."""
    try:
        return await work
    except DatabaseError as e:
        raise NoUpstream(f"who keeps responses is not known now: {e}", "database", 2.0) from None
