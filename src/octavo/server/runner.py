"""Runs what the routes of dialects ask for: one way for all of them, streaming or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.generate.choices import generate, generate_whole
from octavo.generate.embed import count, encode_inputs, encode_pairs, pool, score
from octavo.generate.media import MediaReader
from octavo.generate.model import ServedModel
from octavo.generate.prepare import prepare
from octavo.generate.reply import TextDelta, Usage
from octavo.server.bodies import Bodies
from octavo.server.dialect import (
    Dialect,
    EmbedRoute,
    GenerateRoute,
    ModelsRoute,
    Names,
    ResponseWriter,
    Route,
    ScoreRoute,
    TextRoute,
)
from octavo.server.exchange import exchange
from octavo.server.guard import principal
from octavo.server.http import (
    ClientGone,
    EventStream,
    error_response,
    json_response,
    while_connected,
)
from octavo.server.parsing import Fields
from octavo.server.registry import Registry

FEW = 64  # tokens with log-probabilities whose JSON is made on the event loop
Handler = Callable[[Request], Awaitable[Response]]


class Runner:
    """Makes the handlers of routes."""

    def __init__(self, registry: Registry, bodies: Bodies, media: MediaReader) -> None:
        self._registry = registry
        self._bodies = bodies
        self._media = media

    def handler(self, dialect: Dialect, route: Route | ModelsRoute) -> Handler:
        """The handler of a route, which turns errors into responses."""
        if isinstance(route, ModelsRoute):
            return answering(lambda request: self._models(route, request))
        return answering(lambda request: self._run(dialect.fields, route, request))

    async def _run(self, fields: Fields, route: Route, request: Request) -> Response:
        self._registry.check_loaded()
        body: Any = await self._bodies.read(request, route.body, fields, self._registry.bounds)
        served = self._registry.get(body.model)
        exchange(request.scope).model = self._registry.entry(body.model).name
        names = {"adapter": "model", **route.names(body)}  # a body names an adapter as its model
        try:
            match route:
                case GenerateRoute():
                    return await self._generate(route, body, served, names, request)
                case EmbedRoute():
                    return await self._embed(route, body, served, request)
                case ScoreRoute():
                    return await self._score(route, body, served, request)
                case TextRoute():
                    return json_response(await asyncio.to_thread(route.reply, body, served))
            raise TypeError(route)
        except RequestError as e:
            raise e.renamed(names) from None

    async def _models(self, route: ModelsRoute, request: Request) -> Response:
        self._registry.check_loaded()
        models = self._registry.models()
        if name := request.path_params.get("name"):
            model = self._registry.get(name)
            models = [(model, self._registry.entry(name).name if model.adapter else None)]
        return json_response(route.reply(models))

    # -- vectors ------------------------------------------------------------------------------

    async def _embed(
        self, route: EmbedRoute, body: Any, served: ServedModel, request: Request
    ) -> Response:
        served.require("embed")
        self._registry.check_open()
        texts = await asyncio.to_thread(lambda: encode_inputs(route.inputs(body), served))
        work = pool(served, texts, principal(request.scope).salt)
        pooled = await while_connected(request.receive, work)
        exchange(request.scope).usage = Usage(prompt=count(texts))
        reply = await asyncio.to_thread(route.reply, body, served, pooled, count(texts))
        return json_response(reply)

    async def _score(
        self, route: ScoreRoute, body: Any, served: ServedModel, request: Request
    ) -> Response:
        self._registry.check_open()
        pairs = route.pairs(body)
        texts = await asyncio.to_thread(encode_pairs, pairs, served)
        work = score(served, pairs, texts, principal(request.scope).salt)
        scores = await while_connected(request.receive, work)
        exchange(request.scope).usage = Usage(prompt=count(texts))
        return json_response(route.reply(body, served, scores, count(texts)))

    # -- generation ---------------------------------------------------------------------------

    async def _generate(
        self, route: GenerateRoute, body: Any, served: ServedModel, names: Names, request: Request
    ) -> Response:
        self._registry.check_open()
        salt = principal(request.scope).salt
        asked = replace(await asyncio.to_thread(route.request, body), salt=salt)
        asked = await while_connected(request.receive, self._media.read(asked, served))
        job = await asyncio.to_thread(prepare, asked, served)
        one = exchange(request.scope)
        usage = Usage(prompt=job.prompt_tokens, images=job.image_tokens, began=one.began)
        one.usage = usage
        writer = route.writer(body, job, usage)
        if writer.stream:
            return await _stream(request, generate(job, usage), writer, names)
        choices = await while_connected(request.receive, generate_whole(job, usage))
        return json_response(await asyncio.to_thread(writer.whole, choices))


async def _stream(
    request: Request, deltas: AsyncGenerator[TextDelta, None], writer: ResponseWriter, names: Names
) -> Response:
    """Streams. The status is sent with the first text, so that refusals keep theirs."""
    try:
        first = await while_connected(request.receive, anext(deltas))
    except BaseException:
        await deltas.aclose()
        raise

    async def chunks(delta: TextDelta) -> bytes:
        if len(delta.tokens) + len(delta.prompt) <= FEW:
            return writer.chunks(delta)
        return await asyncio.to_thread(writer.chunks, delta)

    async def frames() -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(deltas) as rest:
                yield writer.opening() + await chunks(first)
                async for delta in rest:
                    yield await chunks(delta)
            yield writer.closing()
        except RequestError as e:
            error = e.renamed(names)
            exchange(request.scope).failed(error)
            yield writer.failure(error)

    return EventStream(frames(), writer.media_type)


def answering(handler: Handler) -> Handler:
    """A handler whose errors become responses in the dialect of the route."""

    @wraps(handler)
    async def wrapped(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestError as e:
            return error_response(e, request.scope)
        except ClientGone:
            return Response(status_code=499)

    return wrapped
