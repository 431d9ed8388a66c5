"""The HTTP application: routes and their handlers."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.errors import Overloaded, RequestError
from octavo.server import decoding, schemas
from octavo.server.client import EngineClient
from octavo.server.generation import Piece, Served, Usage, generate_all, requests_for
from octavo.server.grammar_check import GrammarChecker
from octavo.server.http import (
    ApiKeys,
    ClientGone,
    EventStream,
    error_response,
    json_response,
    read_body,
    while_connected,
)
from octavo.server.jobs import Job, echoed
from octavo.server.lora import AdapterRoutes
from octavo.server.messages import conversation, tool_use
from octavo.server.metrics import Metrics
from octavo.server.replies import DONE, Shape, encode, error_body, error_frame
from octavo.server.vectors import VectorRoutes

Handler = Callable[[Request], Awaitable[Response]]
LogLine = Callable[[str, int, Usage], None]


class NotFound(RequestError):
    status = 404


class Api:
    """Handlers over one served model. `served` is set once the model is loaded."""

    def __init__(
        self, client: EngineClient, log: LogLine = lambda route, status, usage: None
    ) -> None:
        self.client = client
        self.grammars = GrammarChecker(client.table, client.vocabulary)
        self.served: Served | None = None
        self.metrics = Metrics(client)
        self._log = log

    def model(self, name: str | None) -> Served:
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

    def writer(self, name: str) -> Served:
        """The model, if it generates text."""
        served = self.model(name)
        if served.task != "generate":
            raise RequestError(
                f"{served.name} generates no text; it answers /v1/embeddings and /v1/rerank",
                "model",
                "unsupported_task",
            )
        return served

    def done(self, route: str, status: int, usage: Usage | None = None) -> None:
        self.metrics.finished(route, status, usage)
        if usage is not None:
            self._log(route, status, usage)

    # -- generation ---------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        body = schemas.parse(await read_body(request), schemas.ChatBody)
        served = self.writer(body.model)
        template = served.template
        if template is None:
            raise RequestError(
                f"{served.name} has no chat template, so it cannot chat. Use /v1/completions, "
                "or start the server with --chat-template FILE.",
                "model",
                "no_chat_template",
            )
        use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
        messages = conversation(body.messages)
        options = decoding.template_options(body)
        # In a thread: a long text must not hold up everybody else's streams.
        ids = await asyncio.to_thread(
            template.encode, messages, tools=use.told if use else None, **options
        )
        limits = decoding.chat_limits(body)
        params = decoding.sampling(body, served.defaults, served.tokenizer, *limits)
        style, reasons, thinking = template.style, template.reasons, template.thinking(ids)
        structure = decoding.chat_structure(body, use, style, served.tokenizer, reasons, thinking)
        params, reply = decoding.for_chat(
            params, use, style, served.tokenizer, reasons, thinking, body.thinking_token_budget
        )
        job = Job("chat", [ids], params, decoding.choices(body), reply=reply, structure=structure)
        return await self.reply(request, body, served, job)

    async def completions(self, request: Request) -> Response:
        body = schemas.parse(await read_body(request), schemas.CompletionBody)
        served = self.writer(body.model)
        n = decoding.choices(body)
        ids = await asyncio.to_thread(_encode_all, served, schemas.prompts(body))
        limit = 16 if body.max_tokens is None else body.max_tokens
        params = decoding.sampling(body, served.defaults, served.tokenizer, limit, body.logprobs)
        if body.echo and body.logprobs is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=body.logprobs)
        best_of = decoding.candidates(body, n)
        job = Job(
            "completions", ids, params, n, best_of, bool(body.echo),
            structure=decoding.structure(body),
        )  # fmt: skip
        return await self.reply(request, body, served, job)

    async def reply(
        self, request: Request, body: schemas.Common, served: Served, job: Job
    ) -> Response:
        """Checks a job as a whole and runs it, streaming or not."""
        params = job.params
        params.check(served.vocabulary)
        decoding.check_numbers(body, job.prompts, served.vocabulary)
        if (structure := job.structure) is not None:
            grammar = await self.grammars.grammar(structure)
            params = msgspec.structs.replace(params, grammar=grammar, grammar_exit=structure.exits)
        requests = requests_for(
            job.prompts, job.made, params, body.timeout, body.priority or 0,
            request.scope.get("salt", ""), served.adapter,
        )  # fmt: skip
        if len(requests) > decoding.MAX_CHOICES:
            raise RequestError(
                f"{len(requests)} choices in one request; {decoding.MAX_CHOICES} at most", "n"
            )
        usage = Usage(prompt=sum(map(len, job.prompts)))
        reply_id = ("chatcmpl-" if job.chat else "cmpl-") + secrets.token_hex(12)
        shape = Shape(
            job.chat, served, reply_id, int(time.time()), params.logprobs is not None, job.echo
        )
        pieces = generate_all(self.client, served, job.tuned(requests), usage, job.reply)
        if job.echo:
            pieces = echoed(pieces, served.tokenizer, job)
        count = len(job.prompts) * job.made
        if body.stream:
            return await self.stream(request, body, job, count, pieces, shape, usage)
        choices = await while_connected(request.receive, _collect(pieces, count))
        self.done(job.route, 200, usage)
        return json_response(shape.whole(job.best(choices), usage))

    async def stream(
        self, request: Request, body: schemas.Common, job: Job, count: int,
        pieces: AsyncGenerator[Piece, None], shape: Shape, usage: Usage,
    ) -> Response:  # fmt: skip
        """Streams; the status is sent only once there is a first piece, so refusals keep theirs."""
        try:
            first = await while_connected(request.receive, anext(pieces))
        except BaseException:
            await pieces.aclose()
            raise
        with_usage = body.stream_options is not None and body.stream_options.include_usage

        async def frames() -> AsyncGenerator[bytes, None]:
            status = 499
            try:
                async with aclosing(pieces) as rest:
                    opening = b"".join(shape.opening(i, with_usage) for i in range(count))
                    yield opening + shape.chunks(first, with_usage)
                    async for piece in rest:
                        yield shape.chunks(piece, with_usage)
                yield (shape.closing(usage) if with_usage else b"") + DONE
                status = 200
            except RequestError as e:
                status = e.status
                yield error_frame(e) + DONE
            finally:
                self.done(job.route, status, usage)

        return EventStream(frames())

    # -- text ---------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        body = schemas.parse(await read_body(request), schemas.TokenizeBody)
        served = self.model(body.model)
        text = body.prompt if body.prompt is not None else body.content
        if (text is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", "prompt", "invalid_value")
        if text is not None:
            add_bos = None if body.add_special_tokens else False
            ids = await asyncio.to_thread(served.tokenizer.encode, text, add_bos)
        elif served.template is None:
            raise RequestError(
                f"{served.name} has no chat template", "messages", "no_chat_template"
            )
        else:
            ids = await asyncio.to_thread(served.template.encode, conversation(body.messages))
        return json_response(
            encode({"count": len(ids), "max_model_len": served.context, "tokens": ids})
        )

    async def detokenize(self, request: Request) -> Response:
        body = schemas.parse(await read_body(request), schemas.DetokenizeBody)
        served = self.model(body.model)
        if any(not 0 <= t < len(served.tokenizer.bytes) for t in body.tokens):
            raise RequestError("a token is outside the vocabulary", "tokens", "invalid_value")
        text = served.tokenizer.decode(body.tokens)
        return json_response(encode({"prompt": text, "content": text}))

    # -- about the server ---------------------------------------------------------------------

    def _card(self, served: Served) -> dict[str, Any]:
        parent = self.served.name if served.adapter and self.served else None
        return {
            "id": served.name, "object": "model", "created": served.created, "owned_by": "octavo",
            "max_model_len": served.context, "parent": parent,
        }  # fmt: skip

    async def models(self, request: Request) -> Response:
        names = [None, *self.client.adapters] if self.served else []
        cards = [self._card(self.model(name)) for name in names]
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


async def _collect(pieces: AsyncGenerator[Piece, None], count: int) -> list[list[Piece]]:
    """The pieces of each choice, once all have ended."""
    out: list[list[Piece]] = [[] for _ in range(count)]
    async with aclosing(pieces):
        async for piece in pieces:
            out[piece.choice].append(piece)
    return out


def _encode_all(served: Served, prompts: list[str | list[int]]) -> list[list[int]]:
    return [served.tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]


def _guarded(api: Api, route: str, handler: Handler) -> Handler:
    """Turns exceptions into replies in OpenAI's form."""

    @wraps(handler)
    async def wrapped(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestError as e:
            api.done(route, e.status)
            return error_response(e)
        except ClientGone:
            api.done(route, 499)
            return Response(status_code=499)

    return wrapped


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    texts = {404: "there is no such route", 405: "the route does not take this method"}
    return json_response(
        error_body(status, texts.get(status, "the server could not answer")), status
    )


def create_app(api: Api, keys: list[str] | None = None, lora_folder: Path | None = None) -> ApiKeys:
    """The ASGI application. With `keys`, every route but health needs one of them.

    lora_folder: where adapters may be loaded from while serving.
    """
    vectors, lora = VectorRoutes(api), AdapterRoutes(api, lora_folder)
    table = [
        ("/v1/chat/completions", "POST", api.chat),
        ("/v1/completions", "POST", api.completions),
        ("/v1/embeddings", "POST", vectors.embeddings),
        ("/v1/rerank", "POST", vectors.rerank),
        ("/rerank", "POST", vectors.rerank),
        ("/v1/score", "POST", vectors.score),
        ("/score", "POST", vectors.score),
        ("/v1/load_lora_adapter", "POST", lora.load),
        ("/v1/unload_lora_adapter", "POST", lora.unload),
        ("/tokenize", "POST", api.tokenize),
        ("/detokenize", "POST", api.detokenize),
        ("/v1/models", "GET", api.models),
        ("/v1/models/{name:path}", "GET", api.one_model),
        ("/health", "GET", api.ready),
        ("/health/ready", "GET", api.ready),
        ("/health/live", "GET", api.live),
        ("/metrics", "GET", api.render_metrics),
        ("/version", "GET", api.version),
    ]
    routes = [
        Route(path, _guarded(api, path, handler), methods=[method])
        for path, method, handler in table
    ]
    app = Starlette(
        routes=routes, exception_handlers={HTTPException: _http_error, Exception: _http_error}
    )
    return ApiKeys(app, keys or [])
