"""Embeddings, reranking and scoring: texts in, vectors and numbers out."""

from __future__ import annotations

import asyncio
import base64
import secrets
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from octavo.checkpoint.pooling import Vector, unit
from octavo.engine.events import Pooled
from octavo.engine.request import Request, SamplingParams
from octavo.errors import RequestError
from octavo.generate.output import ServedModel, TokenSource, Usage
from octavo.server.dialects.openai.responses import encode
from octavo.server.dialects.openai.sampling_request import check_length, check_texts
from octavo.server.dialects.openai.schemas import Int
from octavo.server.exchange import exchange
from octavo.server.guard import principal
from octavo.server.http import json_response, while_connected
from octavo.server.sizes import Inputs, Texts

if TYPE_CHECKING:
    from octavo.server.app import Api

MAX_INPUTS = 2048
AT_ONCE = 64  # requests of one body in flight

Segments = tuple[list[int], list[int]]  # token ids and their segments


class EmbeddingBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: Annotated[str | list[str | Int | list[Int]], Inputs(MAX_INPUTS)]
    encoding_format: str | None = None
    dimensions: Int | None = None


class Document(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class RerankBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    query: str
    documents: Annotated[list[str | Document], Texts(MAX_INPUTS)]
    top_n: Int | None = None
    return_documents: bool | None = None


class ScoreBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    text_1: Annotated[str | list[str], Texts(MAX_INPUTS)]
    text_2: Annotated[str | list[str], Texts(MAX_INPUTS)]


def _invalid(message: str, param: str) -> RequestError:
    return RequestError(message, param, "invalid_value")


def inputs(body: EmbeddingBody, served: ServedModel) -> list[Segments]:
    """The texts of an embedding request, tokenized. Raises RequestError."""
    given = body.input
    if isinstance(given, str):
        given = [given]
    elif {type(x) for x in given} == {int}:
        given = [given]  # type: ignore[list-item]
    if not 0 < len(given) <= MAX_INPUTS or any(isinstance(x, int) or not x for x in given):
        raise _invalid(f"input takes 1 to {MAX_INPUTS} texts or lists of ids, none empty", "input")
    if body.encoding_format not in (None, "float", "base64"):
        raise _invalid("encoding_format is float or base64", "encoding_format")
    check_texts((text for text in given if isinstance(text, str)), served, "input")
    out = []
    for text in given:
        if isinstance(text, str):
            out.append(served.tokenizer.encode_segments(served.pooling.prepare(text)))
        elif isinstance(text, list):
            out.append((text, []))
    check_length([ids for ids, _ in out], 0, served, "input")
    return out


def pairs_of(pairs: list[tuple[str, str]], served: ServedModel, param: str) -> list[Segments]:
    """Pairs of texts as a cross-encoder reads them; else each text once. Raises RequestError."""
    if not 0 < len(pairs) <= MAX_INPUTS:
        raise _invalid(f"1 to {MAX_INPUTS} pairs are taken", param)
    check_texts(_singles(pairs), served, param)
    encode = served.tokenizer.encode_segments
    if served.task == "rank":
        texts = [encode(a, b) for a, b in pairs]
    else:
        texts = [encode(served.pooling.prepare(text)) for text in _singles(pairs)]
    check_length([ids for ids, _ in texts], 0, served, param)
    return texts


def _singles(pairs: list[tuple[str, str]]) -> list[str]:
    return list(dict.fromkeys(text for pair in pairs for text in pair))


async def pool(
    source: TokenSource, served: ServedModel, texts: list[Segments], salt: str
) -> list[Vector]:
    """The vector of each text: its pooled states, or a cross-encoder's scores."""
    gate = asyncio.Semaphore(AT_ONCE)
    mode = "cls" if served.task == "rank" else served.pooling.mode

    async def one(text: Segments) -> Vector:
        request = Request(
            id=secrets.token_hex(12), prompt=text[0], token_type_ids=text[1],
            params=SamplingParams(), pool=mode, salt=salt, adapter=served.adapter,
        )  # fmt: skip
        async with gate, aclosing(source.submit(request)) as events:
            async for event in events:
                if isinstance(event, Pooled):
                    return np.frombuffer(event.vector, np.float32)
        raise AssertionError("a request ended without its vector")

    tasks = [asyncio.create_task(one(text)) for text in texts]
    try:
        return await asyncio.gather(*tasks)
    finally:  # after a failure, or when the client is gone, the others need not go on
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def embeddings_reply(
    pooled: list[Vector], served: ServedModel, body: EmbeddingBody, tokens: int
) -> bytes:
    """The reply as JSON. Vector by vector, so that other threads get their turn between."""
    data = []
    for i, state in enumerate(pooled):
        v = served.pooling.finish(state, body.dimensions)
        base = body.encoding_format == "base64"
        value = base64.b64encode(v.tobytes()).decode() if base else v.tolist()
        entry = {"object": "embedding", "index": i, "embedding": value}
        data.append(msgspec.Raw(encode(entry)))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return encode({"object": "list", "model": served.name, "data": data, "usage": usage})


async def scores(
    source: TokenSource, served: ServedModel, pairs: list[tuple[str, str]], salt: str, param: str
) -> tuple[list[float], int]:
    """How well the texts of each pair go together, and the tokens it took.

    A cross-encoder's score, else the cosine of the two embeddings.
    """
    texts = await asyncio.to_thread(pairs_of, pairs, served, param)
    if served.task == "rank":
        logits = await pool(source, served, texts, salt)
        return [served.pooling.score(float(x[0])) for x in logits], _count(texts)
    pooled = await pool(source, served, texts, salt)
    vectors = [unit(served.pooling.finish(v)) for v in pooled]
    known = dict(zip(_singles(pairs), vectors, strict=True))
    return [float(np.dot(known[a], known[b])) for a, b in pairs], _count(texts)


def _count(texts: list[Segments]) -> int:
    return sum(len(ids) for ids, _ in texts)


def score_pairs(body: ScoreBody) -> list[tuple[str, str]]:
    """One text against many, or texts in pairs. Raises RequestError."""
    first, second = ([t] if isinstance(t, str) else t for t in (body.text_1, body.text_2))
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second) or not all(first) or not all(second):
        raise _invalid("text_1 is one text, or as many as text_2; none is empty", "text_1")
    return list(zip(first, second, strict=True))


def documents(body: RerankBody) -> list[str]:
    """The documents to rank. Raises RequestError."""
    texts = [d if isinstance(d, str) else d.text for d in body.documents]
    if not body.query or not texts or not all(texts):
        raise _invalid("query and documents must not be empty", "documents")
    if body.top_n is not None and body.top_n < 1:
        raise _invalid(f"top_n is {body.top_n}; it must be 1 or more", "top_n")
    return texts


def rerank_reply(
    body: RerankBody, texts: list[str], relevance: list[float], served: ServedModel, tokens: int
) -> Any:
    """Documents by descending relevance; equal ones keep their order."""
    order = sorted(range(len(texts)), key=lambda i: -relevance[i])[: body.top_n]
    results = []
    for i in order:
        result: dict[str, Any] = {"index": i, "relevance_score": relevance[i]}
        if body.return_documents:
            result["document"] = {"text": texts[i]}
        results.append(result)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"id": "rerank-" + secrets.token_hex(12), "model": served.name, "results": results,
            "usage": usage}  # fmt: skip


class VectorRoutes:
    """The handlers of /v1/embeddings, /v1/rerank and /v1/score."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def embeddings(self, request: HttpRequest) -> Response:
        body = await self._api.body(request, EmbeddingBody)
        served = self._api.model(body.model)
        if served.task == "rank":
            raise RequestError(
                "this model ranks; it makes no embeddings", "model", "unsupported_task"
            )
        texts = await asyncio.to_thread(inputs, body, served)
        work = pool(self._api.client, served, texts, principal(request.scope).salt)
        pooled = await while_connected(request.receive, work)
        tokens = sum(len(ids) for ids, _ in texts)
        exchange(request.scope).usage = Usage(prompt=tokens)
        reply = await asyncio.to_thread(embeddings_reply, pooled, served, body, tokens)
        return json_response(reply)

    async def rerank(self, request: HttpRequest) -> Response:
        body = await self._api.body(request, RerankBody)
        served = self._api.model(body.model)
        texts = documents(body)
        pairs = [(body.query, text) for text in texts]
        salt = principal(request.scope).salt
        work = scores(self._api.client, served, pairs, salt, "documents")
        relevance, tokens = await while_connected(request.receive, work)
        exchange(request.scope).usage = Usage(prompt=tokens)
        return json_response(encode(rerank_reply(body, texts, relevance, served, tokens)))

    async def score(self, request: HttpRequest) -> Response:
        body = await self._api.body(request, ScoreBody)
        served = self._api.model(body.model)
        pairs = score_pairs(body)
        salt = principal(request.scope).salt
        work = scores(self._api.client, served, pairs, salt, "text_1")
        values, tokens = await while_connected(request.receive, work)
        exchange(request.scope).usage = Usage(prompt=tokens)
        data = [{"index": i, "object": "score", "score": v} for i, v in enumerate(values)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        reply = {"object": "list", "model": served.name, "data": data, "usage": usage}
        return json_response(encode(reply))
