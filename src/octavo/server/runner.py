"""Runs what the routes of dialects ask for: one way for all of them, streaming or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.request import MAX_TIMEOUT, MIN_TIMEOUT
from octavo.errors import DeadlineExceeded, InvalidValue, RequestError
from octavo.generate.choices import generate, generate_whole
from octavo.generate.embed import count, encode_inputs, encode_pairs, pool, score
from octavo.generate.media import MediaReader
from octavo.generate.model import ServedModel
from octavo.generate.prepare import PreparedRequest, prepare
from octavo.generate.reply import Usage
from octavo.server import patience
from octavo.server.bodies import Bodies
from octavo.server.cache_events import prompt_name
from octavo.server.dialect import (
    AnyRoute,
    BodyRoute,
    Dialect,
    EmbedRoute,
    FetchRoute,
    FixedRoute,
    GenerateRoute,
    ModelRoute,
    ModelsRoute,
    Names,
    RefusedRoute,
    ResponseWriter,
    ScoreRoute,
    TextRoute,
)
from octavo.server.endpoint import Handler
from octavo.server.exchange import Exchange, exchange
from octavo.server.fetching import Fetching
from octavo.server.guard import principal
from octavo.server.http import (
    ClientGone,
    EventStream,
    error_response,
    json_response,
    started,
    while_connected,
)
from octavo.server.models import leased, model_cards
from octavo.server.most_tokens import read_most, within
from octavo.server.registry import Registry
from octavo.server.resume import Spent, Teller, ended
from octavo.server.sender import computed_for
from octavo.server.sizes import SizeBounds

FEW = 64  # tokens with log-probabilities whose JSON is made on the event loop
TTFT = "x-slo-ttft-ms"
Keep = Callable[[Any], Awaitable[None]]  # of a writer that has written all


class Cancelled(RequestError):
    status = 499

    def __init__(self) -> None:
        super().__init__("the request was cancelled", None, "cancelled")


class Runner:
    """Makes the handlers of routes."""

    def __init__(
        self, registry: Registry, bodies: Bodies, media: MediaReader, fetching: Fetching
    ) -> None:
        self._registry, self._fetching = registry, fetching
        self._bodies = bodies
        self._media = media

    def handler(self, dialect: Dialect, route: AnyRoute) -> Handler:
        """The handler of a route, which turns errors into responses."""
        if isinstance(route, RefusedRoute):
            return answering(lambda request: _refused(route))
        if isinstance(route, FetchRoute):
            return answering(lambda request: self._fetching.answer(dialect, route, request))
        if isinstance(route, ModelRoute):
            return answering(lambda request: self._model(route, request))
        if isinstance(route, FixedRoute):
            return answering(lambda request: _fixed(route))
        if isinstance(route, ModelsRoute):
            return answering(lambda request: self._models(route, request))
        handler = answering(lambda request: self._run(dialect, route, request))
        if isinstance(route, GenerateRoute) and _of_events(route.writer):
            return patience.patient(handler, dialect.error_event)
        return handler

    async def read(
        self, dialect: Dialect, kind: type[Any], request: Request
    ) -> tuple[Any, ServedModel]:
        """A request's body, and the model that it names, leased until the exchange has ended."""
        self._registry.check_loaded()
        called = dialect.model_name

        def bounds(name: str | None) -> SizeBounds:
            return self._registry.bounds(called(name))

        body: Any = await self._bodies.read(request, kind, dialect.fields, bounds)
        name, one, sender = called(body.model), exchange(request.scope), principal(request.scope)
        one.model = self._registry.entry(name).name
        one.stream_awaited = getattr(body, "stream", None) is True
        sender.check_model(name or one.model)
        if sender.account is not None:
            await sender.account.enter()
            one.at_end.append(sender.account.end)
        wanted = getattr(body, "timeout", None)
        known = wanted is not None and MIN_TIMEOUT <= wanted <= MAX_TIMEOUT  # others are refused
        try:
            async with asyncio.timeout(_left(one, wanted) if known else None):
                return body, (await leased(request, self._registry, name)).model
        except TimeoutError:
            raise DeadlineExceeded() from None

    async def _run(self, dialect: Dialect, route: BodyRoute, request: Request) -> Response:
        body, served = await self.read(dialect, route.body, request)
        names = {"adapter": "model", **route.names(body)}  # a body names an adapter as its model
        try:
            match route:
                case GenerateRoute():
                    return await self.generate(route, body, served, names, request)
                case EmbedRoute():
                    return await self._embed(route, body, served, request)
                case ScoreRoute():
                    return await self._score(route, body, served, request)
                case TextRoute():
                    return json_response(await asyncio.to_thread(route.reply, body, served))
            raise TypeError(route)
        except RequestError as e:
            raise e.renamed(names) from None

    async def _model(self, route: ModelRoute, request: Request) -> Response:
        self._registry.check_loaded()
        name = request.query_params.get("model")
        entry = self._registry.entry(name)
        principal(request.scope).check_model(name or entry.name)
        return json_response(await asyncio.to_thread(route.reply, entry.called(name)))

    async def _models(self, route: ModelsRoute, request: Request) -> Response:
        self._registry.check_loaded()
        cards = model_cards(self._registry)
        if name := request.path_params.get("name"):
            entry = self._registry.entry(name)
            named = entry.name if name in entry.aliases else name
            cards = [card for card in cards if card.name == named]
        return json_response(route.reply(cards))

    # -- vectors ------------------------------------------------------------------------------

    async def _embed(
        self, route: EmbedRoute, body: Any, served: ServedModel, request: Request
    ) -> Response:
        served.require("embed")
        self._registry.check_open()
        texts = await asyncio.to_thread(lambda: encode_inputs(route.inputs(body), served))
        await _reserve(request, usage := Usage(prompt=count(texts)), 0)
        one = exchange(request.scope)
        one.usage, one.operation = usage, "embeddings"
        work = pool(served, texts, *computed_for(request), usage)
        pooled = await while_connected(request.receive, work)
        reply = await asyncio.to_thread(route.reply, body, served, pooled, count(texts))
        return json_response(reply)

    async def _score(
        self, route: ScoreRoute, body: Any, served: ServedModel, request: Request
    ) -> Response:
        self._registry.check_open()
        pairs = route.pairs(body)
        texts = await asyncio.to_thread(encode_pairs, pairs, served)
        await _reserve(request, usage := Usage(prompt=count(texts)), 0)
        one = exchange(request.scope)
        one.usage, one.operation = usage, "rerank"
        work = score(served, pairs, texts, *computed_for(request), usage)
        scores = await while_connected(request.receive, work)
        return json_response(route.reply(body, served, scores, count(texts)))

    # -- generation ---------------------------------------------------------------------------

    async def generate(
        self, route: GenerateRoute, body: Any, served: ServedModel, names: Names, request: Request,
        keep: Keep | None = None,
    ) -> Response:  # fmt: skip
        """The response of a body, whole or as a stream. keep: called before its end is sent."""
        if (reply := route.nothing(body, served)) is not None:
            return json_response(reply)
        job, usage = await self.prepare(route, body, served, request)
        writer = route.writer(body, job, usage)
        if writer.stream:
            return await _stream(request, job, usage, writer, names, keep)
        choices = await while_connected(request.receive, generate_whole(job, usage))
        reply = await asyncio.to_thread(writer.whole, choices)
        if keep is not None:
            await keep(writer)
        return json_response(reply)

    async def prepare(
        self, route: GenerateRoute, body: Any, served: ServedModel, request: Request
    ) -> tuple[PreparedRequest, Usage]:
        """What a body asks for, ready for the engine, and its tokens, which are reserved."""
        self._registry.check_open()
        sender, one = computed_for(request), exchange(request.scope)
        asked = await asyncio.to_thread(route.request, body)
        asked = replace(asked, salt=sender.salt, tenant=sender.tenant, ttft=_wanted(request))
        asked = await while_connected(request.receive, self._media.read(asked, served))
        job = await asyncio.to_thread(prepare, asked, served)
        timeout, ttft = _left(one, job.timeout), _left(one, job.ttft)
        name = prompt_name(request.headers)
        job = replace(job, timeout=timeout, ttft=ttft, prompt_name=name)
        usage = Usage(prompt=job.prompt_tokens, images=job.image_tokens, began=one.began)
        one.usage = usage
        one.operation = "text_completion" if asked.messages is None else "chat"
        most = job.params.max_tokens
        await _reserve(request, usage, most and most * len(job.prompts) * job.made)
        return job, usage


async def _refused(route: RefusedRoute) -> Response:
    raise RequestError(route.reason, None, "unsupported_operation")


async def _fixed(route: FixedRoute) -> Response:
    return Response(route.reply(), media_type=route.media_type)


def _wanted(request: Request) -> float | None:
    """Seconds in which a client wants the first token. Raises InvalidValue."""
    if (text := request.headers.get(TTFT)) is None:
        return None
    if not text.isdecimal() or len(text) > 8 or not 1 <= int(text) <= 1000 * MAX_TIMEOUT:
        raise InvalidValue(f"{TTFT} is a number of milliseconds, a day at most", TTFT)
    return int(text) / 1000


def _left(one: Exchange, seconds: float | None) -> float | None:
    """What is left of the time that a request has from its arrival."""
    if seconds is None:
        return None
    return max(MIN_TIMEOUT, round(seconds - (time.monotonic() - one.began), 3))


async def _reserve(request: Request, usage: Usage, completion: int | None) -> None:
    """Reserves tokens of the sender's account until the exchange ends. Raises RateLimited,
    InvalidValue."""
    most = read_most(request.headers)
    usage.covers = within(most, None)
    if (account := principal(request.scope).account) is not None:
        meter = await account.take(usage.prompt, completion)
        usage.covers = within(most, meter.covers)
        exchange(request.scope).at_end.append(lambda: meter.settle(usage.computed))


async def _stream(
    request: Request, job: PreparedRequest, usage: Usage, writer: ResponseWriter, names: Names,
    keep: Keep | None,
) -> Response:  # fmt: skip
    """Streams. The status is sent with the first text, so that refusals keep theirs; after PATIENCE
    seconds without one it is sent, and comments."""

    written = _written(job, usage, writer)

    async def begun() -> bytes:
        return await anext(written)

    first, one = asyncio.create_task(begun()), exchange(request.scope)
    one.stream_awaited = False
    left = max(0.0, patience.PATIENCE - (time.monotonic() - one.began))
    try:
        wait = asyncio.wait({first}, timeout=left if _of_events(writer) else None)
        await while_connected(request.receive, wait)
        if first.done():
            first.result()
    except BaseException:
        await patience.stop(first)
        await written.aclose()
        raise

    async def frames() -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(written) as rest:
                try:
                    yield b""
                    async with aclosing(patience.comments(first)) as waiting:
                        async for comment in waiting:
                            yield comment
                finally:
                    await patience.stop(first)
                yield first.result()
                async for chunks in rest:
                    yield chunks
            end = writer.closing()
            if job.resume is not None:
                end += ended(Spent(usage.prompt, usage.completion, usage.cached))
            if keep is not None:
                await keep(writer)
            one.final = True
            yield end
        except RequestError as e:
            error = e.renamed(names)
            one.failed(error)
            one.final = True
            yield writer.failure(error)

    return EventStream(await started(frames()), writer.media_type)


async def _written(
    job: PreparedRequest, usage: Usage, writer: ResponseWriter
) -> AsyncGenerator[bytes, None]:
    """The chunks of a stream, without what was given before it was resumed."""
    teller = None if job.resume is None else Teller(job.resume)
    opening: bytes | None = None
    async with aclosing(generate(job, usage)) as deltas:
        async for delta in deltas:
            if opening is None:
                opening = writer.opening()
            if len(delta.tokens) + len(delta.prompt) <= FEW:
                chunks = writer.chunks(delta)
            else:
                chunks = await asyncio.to_thread(writer.chunks, delta)
            chunks, opening = opening + chunks, b""
            if teller is not None:
                chunks = teller.tell(delta, chunks)
            if chunks or teller is None:
                yield chunks


def _of_events(writer: Any) -> bool:
    return str(writer.media_type).startswith(patience.EVENTS)


def answering(handler: Handler) -> Handler:
    """A handler whose errors become responses in the dialect of the route."""

    @wraps(handler)
    async def wrapped(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestError as e:
            return error_response(e, request.scope)
        except ClientGone:
            if exchange(request.scope).cancelled:
                return error_response(Cancelled(), request.scope)
            return Response(status_code=499)

    return wrapped
