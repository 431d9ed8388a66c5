"""Vectors of texts and scores of pairs, computed by a served model."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import aclosing

import numpy as np

from octavo.checkpoint.pooling import Vector, unit
from octavo.engine.events import Ended, Pooled
from octavo.engine.request import Request, SamplingParams
from octavo.errors import EngineFailed
from octavo.generate.lengths import check_length, check_texts
from octavo.generate.model import ServedModel
from octavo.generate.output import failure
from octavo.generate.reply import Usage

AT_ONCE = 64  # engine requests of one call in flight

Segments = tuple[list[int], list[int]]  # token ids and their token_type_ids
Pair = tuple[str, str]


def count(texts: Sequence[Segments]) -> int:
    """Tokens of all texts."""
    return sum(len(ids) for ids, _ in texts)


def encode_inputs(inputs: Sequence[str | list[int]], model: ServedModel) -> list[Segments]:
    """Texts to embed as tokens. Raises RequestError for `inputs`."""
    check_texts((text for text in inputs if isinstance(text, str)), model, "inputs")
    encode, prepare = model.tokenizer.encode_segments, model.pooling.prepare
    texts = [encode(prepare(t)) if isinstance(t, str) else (t, []) for t in inputs]
    check_length([ids for ids, _ in texts], 0, model, "inputs")
    return texts


def encode_pairs(pairs: Sequence[Pair], model: ServedModel) -> list[Segments]:
    """Each pair as a cross-encoder reads it; for other models each text, once.

    Raises RequestError for `pairs`.
    """
    check_texts(_singles(pairs), model, "pairs")
    encode = model.tokenizer.encode_segments
    if model.task == "rank":
        texts = [encode(a, b) for a, b in pairs]
    else:
        texts = [encode(model.pooling.prepare(text)) for text in _singles(pairs)]
    check_length([ids for ids, _ in texts], 0, model, "pairs")
    return texts


def _singles(pairs: Sequence[Pair]) -> list[str]:
    return list(dict.fromkeys(text for pair in pairs for text in pair))


async def pool(
    model: ServedModel, texts: Sequence[Segments], salt: str = "", tenant: str = "",
    usage: Usage | None = None,
) -> list[Vector]:  # fmt: skip
    """The pooled states of each text; a cross-encoder's logits. usage: learns what is computed."""
    counted, group = usage or Usage(), secrets.token_hex(12)
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, text: Segments) -> Vector:
        async with gate:
            return await _pooled(model, number, text, salt, tenant, counted, group)

    tasks = [asyncio.create_task(one(i, text)) for i, text in enumerate(texts)]
    try:
        return await asyncio.gather(*tasks)
    finally:  # after a failure, or when the client is gone, the others need not go on
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pooled(
    model: ServedModel, number: int, text: Segments, salt: str, tenant: str, usage: Usage,
    group: str,
) -> Vector:  # fmt: skip
    ids, types = text
    request = Request(
        id=secrets.token_hex(12), prompt=ids, token_type_ids=types, params=SamplingParams(),
        pool="cls" if model.task == "rank" else model.pooling.mode, salt=salt,
        adapter=model.adapter, tenant=tenant, progress=True, group=group,
    )  # fmt: skip
    async with aclosing(model.client.submit(request)) as events:
        async for event in events:
            usage.reach(number, event, len(ids))
            if isinstance(event, Pooled):
                usage.stamp(event.times)
                return np.frombuffer(event.vector, np.float32)
            if isinstance(event, Ended) and (error := failure(event)):
                raise error
    raise EngineFailed("the request ended without its vector", code="engine_error")


async def score(
    model: ServedModel, pairs: Sequence[Pair], texts: Sequence[Segments], salt: str = "",
    tenant: str = "", usage: Usage | None = None,
) -> list[float]:  # fmt: skip
    """How well the texts of each pair match: a cross-encoder's score, else the cosine of vectors.

    texts: what `encode_pairs` makes of the pairs.
    """
    pooled = await pool(model, texts, salt, tenant, usage)
    if model.task == "rank":
        return [model.pooling.score(float(x[0])) for x in pooled]
    vectors = [unit(model.pooling.finish(v)) for v in pooled]
    known = dict(zip(_singles(pairs), vectors, strict=True))
    return [float(np.dot(known[a], known[b])) for a, b in pairs]
