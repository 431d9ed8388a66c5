"""Bodies and responses of /v1/embeddings, /v1/rerank and /v1/score."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from octavo.checkpoint.pooling import Vector
from octavo.errors import InvalidValue
from octavo.generate.model import ServedModel
from octavo.server.dialects.openai.responses import encode
from octavo.server.dialects.openai.schemas import Int
from octavo.server.sizes import Inputs, Texts

MAX_INPUTS = 2048


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


def inputs(body: EmbeddingBody) -> list[str | list[int]]:
    """The texts or lists of ids of an embedding request. Raises InvalidValue."""
    given: Any = body.input
    if isinstance(given, str) or {type(x) for x in given} == {int}:
        given = [given]
    if not 0 < len(given) <= MAX_INPUTS or any(isinstance(x, int) or not x for x in given):
        raise InvalidValue(
            f"input takes 1 to {MAX_INPUTS} texts or lists of ids, none empty", "input"
        )
    if body.encoding_format not in (None, "float", "base64"):
        raise InvalidValue("encoding_format is float or base64", "encoding_format")
    return list(given)


def embeddings_reply(
    body: EmbeddingBody, served: ServedModel, pooled: Sequence[Vector], tokens: int
) -> bytes:
    """The response as JSON. Made vector by vector, so that other threads can run in between."""
    data = []
    for i, state in enumerate(pooled):
        v = served.pooling.finish(state, body.dimensions)
        base = body.encoding_format == "base64"
        value = base64.b64encode(v.tobytes()).decode() if base else v.tolist()
        entry = {"object": "embedding", "index": i, "embedding": value}
        data.append(msgspec.Raw(encode(entry)))
    reply = {"object": "list", "model": served.name, "data": data, "usage": _usage(tokens)}
    return encode(reply)


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _checked(pairs: list[tuple[str, str]], param: str) -> list[tuple[str, str]]:
    if not 0 < len(pairs) <= MAX_INPUTS:
        raise InvalidValue(f"{param}: 1 to {MAX_INPUTS} pairs are taken", param)
    return pairs


def score_pairs(body: ScoreBody) -> list[tuple[str, str]]:
    """One text against many, or texts in pairs. Raises InvalidValue."""
    first, second = ([t] if isinstance(t, str) else t for t in (body.text_1, body.text_2))
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second) or not all(first) or not all(second):
        raise InvalidValue("text_1 is one text, or as many as text_2; none is empty", "text_1")
    return _checked(list(zip(first, second, strict=True)), "text_1")


def score_reply(
    body: ScoreBody, served: ServedModel, scores: Sequence[float], tokens: int
) -> bytes:
    data = [{"index": i, "object": "score", "score": v} for i, v in enumerate(scores)]
    reply = {"object": "list", "model": served.name, "data": data, "usage": _usage(tokens)}
    return encode(reply)


def _documents(body: RerankBody) -> list[str]:
    return [d if isinstance(d, str) else d.text for d in body.documents]


def rerank_pairs(body: RerankBody) -> list[tuple[str, str]]:
    """The query with each document. Raises InvalidValue."""
    texts = _documents(body)
    if not body.query or not texts or not all(texts):
        raise InvalidValue("query and documents must not be empty", "documents")
    if body.top_n is not None and body.top_n < 1:
        raise InvalidValue(f"top_n is {body.top_n}; it must be 1 or more", "top_n")
    return _checked([(body.query, text) for text in texts], "documents")


def rerank_reply(
    body: RerankBody, served: ServedModel, relevance: Sequence[float], tokens: int
) -> bytes:
    """Documents by descending relevance; equal ones keep their order."""
    texts = _documents(body)
    order = sorted(range(len(texts)), key=lambda i: -relevance[i])[: body.top_n]
    results = []
    for i in order:
        result: dict[str, Any] = {"index": i, "relevance_score": relevance[i]}
        if body.return_documents:
            result["document"] = {"text": texts[i]}
        results.append(result)
    id = "rerank-" + secrets.token_hex(12)
    return encode({"id": id, "model": served.name, "results": results, "usage": _usage(tokens)})
