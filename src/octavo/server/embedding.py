"""Vectors of texts and scores of pairs, computed by a served model."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import aclosing

import numpy as np

from octavo.checkpoint.pooling import Vector, unit
from octavo.engine.request import Request, SamplingParams
from octavo.generate.model import ServedModel
from octavo.server.dialects.openai.sampling_request import check_length, check_texts

AT_ONCE = 64  # requests of one body in flight

Segments = tuple[list[int], list[int]]  # token ids and their segments
Pair = tuple[str, str]


def count(texts: Sequence[Segments]) -> int:
    """Tokens of all texts."""
    return sum(len(ids) for ids, _ in texts)


def encode_inputs(inputs: Sequence[str | list[int]], served: ServedModel) -> list[Segments]:
    """Texts to embed as tokens. Raises RequestError for `inputs`."""
    check_texts((text for text in inputs if isinstance(text, str)), served, "inputs")
    encode, prepare = served.tokenizer.encode_segments, served.pooling.prepare
    texts = [encode(prepare(t)) if isinstance(t, str) else (t, []) for t in inputs]
    check_length([ids for ids, _ in texts], 0, served, "inputs")
    return texts


def encode_pairs(pairs: Sequence[Pair], served: ServedModel) -> list[Segments]:
    """Each pair as a cross-encoder reads it; for other models each text, once.

    Raises RequestError for `pairs`.
    """
    check_texts(_singles(pairs), served, "pairs")
    encode = served.tokenizer.encode_segments
    if served.task == "rank":
        texts = [encode(a, b) for a, b in pairs]
    else:
        texts = [encode(served.pooling.prepare(text)) for text in _singles(pairs)]
    check_length([ids for ids, _ in texts], 0, served, "pairs")
    return texts


def _singles(pairs: Sequence[Pair]) -> list[str]:
    return list(dict.fromkeys(text for pair in pairs for text in pair))


async def pool(served: ServedModel, texts: Sequence[Segments], salt: str) -> list[Vector]:
    """The pooled states of each text; a cross-encoder's logits."""
    gate = asyncio.Semaphore(AT_ONCE)
    mode = "cls" if served.task == "rank" else served.pooling.mode

    async def one(text: Segments) -> Vector:
        request = Request(
            id=secrets.token_hex(12), prompt=text[0], token_type_ids=text[1],
            params=SamplingParams(), pool=mode, salt=salt, adapter=served.adapter,
        )  # fmt: skip
        async with gate, aclosing(served.client.submit(request)) as events:
            async for event in events:
                if event.vector:
                    return np.frombuffer(event.vector, np.float32)
        raise AssertionError("a request ended without its vector")

    tasks = [asyncio.create_task(one(text)) for text in texts]
    try:
        return await asyncio.gather(*tasks)
    finally:  # after a failure, or when the client is gone, the others need not go on
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def score(
    served: ServedModel, pairs: Sequence[Pair], texts: Sequence[Segments], salt: str
) -> list[float]:
    """How well the texts of each pair match: a cross-encoder's score, else the cosine of vectors.

    texts: what `encode_pairs` makes of the pairs.
    """
    pooled = await pool(served, texts, salt)
    if served.task == "rank":
        return [served.pooling.score(float(x[0])) for x in pooled]
    vectors = [unit(served.pooling.finish(v)) for v in pooled]
    known = dict(zip(_singles(pairs), vectors, strict=True))
    return [float(np.dot(known[a], known[b])) for a, b in pairs]
