"""The HTTP application: routes and their handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import wraps
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from octavo.client.process import EngineProcessClient
from octavo.errors import Overloaded, RequestError
from octavo.generate.grammar_check import GrammarChecker
from octavo.generate.model import ServedModel
from octavo.generate.output import generate_all, requests_for
from octavo.generate.reply import TextDelta, Usage
from octavo.server.adapters import AdapterRoutes
from octavo.server.bodies import Bodies
from octavo.server.dialects.openai import sampling_request, schemas
from octavo.server.dialects.openai.embeddings import VectorRoutes
from octavo.server.dialects.openai.jobs import (
    Job,
    chat_job,
    completion_job,
    detokenized,
    echoed,
    tokenized,
)
from octavo.server.dialects.openai.responses import (
    DONE,
    ResponseWriter,
    encode,
    error_body,
    error_frame,
)
from octavo.server.dialects.openai.schemas import Body
from octavo.server.exchange import OTHER, Observer, exchange
from octavo.server.guard import Access, guarded, principal
from octavo.server.http import (
    ClientGone,
    EventStream,
    error_response,
    json_response,
    while_connected,
)
from octavo.server.metrics import Metrics
from octavo.server.recorder import InternalError, Recorded, Recorder
from octavo.server.sizes import Model

FEW = 64  # tokens with log-probabilities that are made JSON of on the event loop
Handler = Callable[[Request], Awaitable[Response]]


class NotFound(RequestError):
    status = 404


class Api:
    """Handlers over one served model. `served` is set once the model is loaded."""

    def __init__(self, client: EngineProcessClient) -> None:
        self.client = client
        self.bodies = Bodies()
        self.grammars = GrammarChecker(client.table, client.vocabulary)
        self.served: ServedModel | None = None
        self.metrics = Metrics(client)

    def model(self, name: str | None) -> ServedModel:
        if self.served is None:
            raise Overloaded("the model is still loading", code="loading")
        if name in self.client.adapters:
            return replace(self.served, name=name, adapter=name)
        if name is not None and name not in (self.served.name, *self.served.aliases):
            raise NotFound(
                f"no model {name[:64]!r} here; this server has {self.served.name!r}",
                "model",
                "model_not_found",
            )
        return self.served

    def writer(self, name: str | None) -> ServedModel:
        """The model, if it generates text."""
        served = self.model(name)
        if served.task != "generate":
            raise RequestError(
                f"{served.name} generates no text; it answers /v1/embeddings and /v1/rerank",
                "model",
                "unsupported_task",
            )
        return served

    # -- generation ---------------------------------------------------------------------------

    async def body(self, request: Request, kind: type[Body]) -> Body:
        """The request's body, checked. Raises RequestError."""
        served = self.model(None)
        return await self.bodies.read(request, kind, Model(served.context, served.vocabulary))

    async def chat(self, request: Request) -> Response:
        body = await self.body(request, schemas.ChatBody)
        served = self.writer(body.model)
        job = await asyncio.to_thread(chat_job, body, served)
        return await self.reply(request, body, served, job)

    async def completions(self, request: Request) -> Response:
        body = await self.body(request, schemas.CompletionBody)
        served = self.writer(body.model)
        job = await asyncio.to_thread(completion_job, body, served)
        return await self.reply(request, body, served, job)

    async def reply(
        self, request: Request, body: schemas.Common, served: ServedModel, job: Job
    ) -> Response:
        """Runs a job, streaming or not."""
        if (structure := job.structure) is not None:
            grammar = await self.grammars.grammar(structure)
            params = msgspec.structs.replace(
                job.params, grammar=grammar, grammar_exit=structure.exits
            )
            job = replace(job, params=params)
        requests = requests_for(
            job.prompts, job.made, job.params, body.timeout, body.priority or 0,
            sampling_request.salted(principal(request.scope).salt, body.cache_salt), served.adapter,
        )  # fmt: skip
        usage = Usage(prompt=sum(map(len, job.prompts)))
        shape = ResponseWriter(job, served, usage, body.stream_options)
        pieces = generate_all(served, job.tuned(requests), usage, job.reply)
        if job.echo:
            pieces = echoed(pieces, served.tokenizer, job)
        exchange(request.scope).usage = usage
        if body.stream:
            return await self.stream(request, pieces, shape)
        count = len(job.prompts) * job.made
        choices = await while_connected(request.receive, _collect(pieces, count))
        whole = await asyncio.to_thread(lambda: shape.whole(job.best(choices)))
        return json_response(whole)

    async def stream(
        self, request: Request, pieces: AsyncGenerator[TextDelta, None], shape: ResponseWriter
    ) -> Response:  # fmt: skip
        """Streams; the status is sent only once there is a first piece, so refusals keep theirs."""
        try:
            first = await while_connected(request.receive, anext(pieces))
        except BaseException:
            await pieces.aclose()
            raise

        async def chunks(piece: TextDelta) -> bytes:
            if len(piece.tokens) + len(piece.prompt) <= FEW:
                return shape.chunks(piece)
            return await asyncio.to_thread(shape.chunks, piece)

        async def frames() -> AsyncGenerator[bytes, None]:
            try:
                async with aclosing(pieces) as rest:
                    yield shape.opening() + await chunks(first)
                    async for piece in rest:
                        yield await chunks(piece)
                yield shape.closing() + DONE
            except RequestError as e:
                exchange(request.scope).failed(e)
                yield error_frame(e) + DONE

        return EventStream(frames())

    # -- text ---------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        body = await self.body(request, schemas.TokenizeBody)
        served = self.model(body.model)
        ids = await asyncio.to_thread(tokenized, body, served)
        reply = {"count": len(ids), "max_model_len": served.context, "tokens": ids}
        return json_response(await asyncio.to_thread(encode, reply))

    async def detokenize(self, request: Request) -> Response:
        body = await self.body(request, schemas.DetokenizeBody)
        text = await asyncio.to_thread(detokenized, body, self.model(body.model))
        return json_response(encode({"prompt": text, "content": text}))

    # -- about the server ---------------------------------------------------------------------

    def _card(self, served: ServedModel) -> dict[str, Any]:
        parent = self.served.name if served.adapter and self.served else None
        return {
            "id": served.name, "object": "model", "created": served.created, "owned_by": "octavo",
            "max_model_len": served.context, "parent": parent,
        }  # fmt: skip

    async def models(self, request: Request) -> Response:
        cards = [self._card(self.model(name)) for name in (None, *self.client.adapters)]
        return json_response(encode({"object": "list", "data": cards}))

    async def one_model(self, request: Request) -> Response:
        return json_response(encode(self._card(self.model(request.path_params["name"]))))

    async def live(self, request: Request) -> Response:
        return json_response(b'{"status":"live"}')

    async def ready(self, request: Request) -> Response:
        ready = self.client.ready and self.served is not None
        state = "ready" if ready else "draining" if self.client.draining else "not ready"
        return json_response(encode({"status": state}), 200 if ready else 503)

    async def render_metrics(self, request: Request) -> Response:
        return Response(
            self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def version(self, request: Request) -> Response:
        return json_response(encode({"version": version("octavo")}))


async def _collect(pieces: AsyncGenerator[TextDelta, None], count: int) -> list[list[TextDelta]]:
    """The pieces of each choice, once all have ended."""
    out: list[list[TextDelta]] = [[] for _ in range(count)]
    async with aclosing(pieces):
        async for piece in pieces:
            out[piece.choice].append(piece)
    return out


def _guarded(handler: Handler) -> Handler:
    """Turns what is wrong with a request into a reply in OpenAI's form."""

    @wraps(handler)
    async def wrapped(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestError as e:
            return error_response(e, request.scope)
        except ClientGone:
            return Response(status_code=499)

    return wrapped


class HTTPError(RequestError):
    """What the router refuses."""

    def __init__(self, status: int) -> None:
        texts = {404: "there is no such route", 405: "the route does not take this method"}
        super().__init__(texts.get(status, HTTPStatus(status).phrase))
        self.status = status


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        wrong = InternalError("the server could not answer", code="internal_error")
        return error_response(wrong, request.scope)
    response = error_response(HTTPError(error.status_code), request.scope)
    response.headers.update(error.headers or {})
    return response


def create_app(
    api: Api, access: Access, observe: Observer, lora_folder: Path | None = None
) -> ASGIApp:
    """The ASGI application, which calls `observe` with every exchange that has ended.

    lora_folder: where adapters may be loaded from while serving.
    """
    vectors, lora = VectorRoutes(api), AdapterRoutes(api, lora_folder)
    table = [
        ("/v1/chat/completions", "POST", api.chat),
        ("/v1/completions", "POST", api.completions),
        ("/v1/embeddings", "POST", vectors.embeddings),
        ("/v1/rerank", "POST", vectors.rerank),
        ("/v1/score", "POST", vectors.score),
        ("/v1/load_lora_adapter", "POST", lora.load),
        ("/v1/unload_lora_adapter", "POST", lora.unload),
        ("/v1/models", "GET", api.models),
        ("/v1/models/{name:path}", "GET", api.one_model),
        ("/tokenize", "POST", api.tokenize),
        ("/detokenize", "POST", api.detokenize),
        ("/health", "GET", api.ready),
        ("/health/ready", "GET", api.ready),
        ("/health/live", "GET", api.live),
        ("/metrics", "GET", api.render_metrics),
        ("/version", "GET", api.version),
    ]
    routes, paths = [], {}
    for path, method, handler in table:
        for spelled in dict.fromkeys((path, path.removeprefix("/v1"))):
            routes.append(Route(spelled, _guarded(handler), methods=[method]))
            paths[spelled.partition("{")[0]] = Recorded(path, error_body)
    app = Starlette(
        routes=routes, exception_handlers={HTTPException: _http_error, Exception: _http_error}
    )
    return Recorder(guarded(app, access), paths, Recorded(OTHER, error_body), observe)
