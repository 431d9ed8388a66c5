"""What speculative decoding saves: the same requests with and without it, by turns."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.backends.base import BLOCK, Executable, SamplingRow
from octavo.client.in_process import InProcessClient
from octavo.engine.events import Ended, Token
from octavo.engine.limits import MAX_DRAFT
from octavo.engine.loader import load_executable, make_engine
from octavo.engine.open import open_draft, open_model
from octavo.engine.plan import make_plan
from octavo.engine.request import Request, SamplingParams
from octavo.engine.runner import DraftSpan, draft_input
from octavo.generate.output import failure
from octavo.generate.served import token_table
from octavo.text import ChatTemplate, load_tokenizer
from octavo.text.chat import template_source
from octavo.text.grammar import from_schema
from octavo.text.messages import message

WAYS = ("off", "auto")
GREEDY = SamplingRow()
CUE = "\n\nAnswer:\n"  # after texts for models without a chat template
# In deviations: half of all values are nearer to the mean. And by how much a deviation that is
# taken from that is too small, by the number of values.
NORMAL_DISTANCE = statistics.NormalDist().inv_cdf(0.75)
FEW = {3: 1.495, 4: 1.363, 5: 1.206, 6: 1.2, 7: 1.14, 8: 1.129, 9: 1.107}
LOTS = 600  # digits that a request predicts
CONTEXT, ROUNDS = 256, 9  # tokens of the sequence, and steps of each number of rows that are timed
NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo Jana Kai Lea Max Nora Otto Pia".split()
CITIES = "Bern Oslo Rome Kiel Lyon Graz Cork Bari Nice Gent Linz Metz Pisa Riga Bonn York".split()
TABLE = "\n".join(
    f"{i:03d},{name},{18 + 7 * i % 60},{city}"
    for i, (name, city) in enumerate(zip(NAMES, CITIES, strict=True))
)
LIGHTHOUSE = (
    "The lighthouse at Cape Marrow was built in 1871 by the Harbour Board. Its tower is 34 metres "
    "high and made of grey granite. The lamp was first lit with whale oil, then with paraffin, and "
    "since 1958 with electricity. Three keepers lived in the house beside the tower until the "
    "light was made automatic in 1984. Today the house is a small museum, open from May to "
    "September. Visitors may climb the 172 steps to the gallery, from where the islands can be "
    "seen in clear weather."
)
QUOTE = "Quote the three most important sentences of this text, without any change"
TYPOS = LIGHTHOUSE.replace("first", "frist").replace("clear", "claer")
PEOPLE = f"List the first people of this table as JSON:\n{TABLE}"
SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array", "minItems": 4, "maxItems": 8,
            "items": {
                "type": "object",
                "properties": {
                    "first_name": {"type": "string", "maxLength": 12},
                    "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
                    "city_of_residence": {"type": "string", "maxLength": 16},
                },
                "required": ["first_name", "age_in_years", "city_of_residence"],
            },
        },
    },
    "required": ["people"],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Requests that run together: `streams` of a text, each of so many tokens at most.

    logprobs: log-probabilities are asked for, so that tokens which a grammar forces need steps.
    digits: nothing else may be drawn, so that all pairs of tokens were there before, also in what
    the request predicts.
    """

    name: str
    text: str
    streams: int = 1
    tokens: int = 192
    schema: bool = False
    logprobs: bool = False
    digits: bool = False
    temperature: float = 0.0


CASES = (
    Case("copy", f"Repeat this table line by line, without any change:\n{TABLE}"),
    Case("edit", f"Correct the spelling of this text and write it again:\n\n{TYPOS}", tokens=112),
    Case("summary", f"{QUOTE}:\n\n{LIGHTHOUSE}", tokens=104),
    Case("table edit", f"Repeat this table, but write Paris in place of Rome:\n{TABLE}"),
    Case("json", PEOPLE, schema=True),
    Case("json logprobs", PEOPLE, schema=True, logprobs=True),
    Case("chat", "Tell me how a lighthouse works, in a few paragraphs.", temperature=0.8),
    Case("noise", "Tell me how a lighthouse works.", temperature=2.0),
    Case("digits", "Draw lots.", temperature=2.0, digits=True),
    Case("chat 8", "Tell me of the sea, in a few paragraphs.", 8, 96, temperature=0.8),
    Case("chat 32", "Tell me of the sea, in a few paragraphs.", 32, 48, temperature=0.8),
)


@dataclass(frozen=True)
class Saving:
    """tps: tokens a second without and with, after the first. Medians over rounds of the ratio of
    both: gain, in the time of whole requests; writing, writing_cpu, in the time after the first
    token, and its processor time. error: the standard error of writing. lost: the part of the time
    after the first token that went to looking for drafts and to rejected ones. step: tokens a
    stream gets in a step, with. drafted, accepted: tokens, over all rounds."""

    name: str
    tps: tuple[float, float]
    gain: float
    writing: float
    writing_cpu: float
    error: float
    lost: float
    step: float
    drafted: int
    accepted: int


@dataclass(frozen=True)
class _Run:
    """seconds: of all; writing, writing_cpu: after the first token. tokens, logprobs: of each."""

    seconds: float
    writing: float
    writing_cpu: float
    tokens: list[list[int]]
    logprobs: list[list[float]]
    stats: dict[str, int]


async def _run(client: InProcessClient, requests: list[Request]) -> _Run:
    """Raises RequestError."""

    first: list[tuple[float, float]] = []

    def clocks() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    async def read(request: Request) -> list[Token]:
        out = []
        async with aclosing(client.submit(request)) as events:
            async for event in events:
                if isinstance(event, Ended) and (error := failure(event)):
                    raise error
                if isinstance(event, Token):
                    if not first:
                        first.append(clocks())
                    out.append(event)
        return out

    before, (began, _) = dict(client.stats), clocks()
    texts = await asyncio.gather(*map(read, requests))
    wall, cpu = clocks()
    return _Run(
        wall - began, wall - first[0][0], cpu - first[0][1],
        [[e.token for e in text] for text in texts], [[e.logprob for e in text] for text in texts],
        {k: v - before[k] for k, v in client.stats.items()},
    )  # fmt: skip


def _requests(
    case: Case, prompt: list[int], digits: list[int], turn: int, way: str
) -> list[Request]:
    """Each turn draws with other numbers. A salt of its own keeps it from the replies of others."""
    lots = random.Random(turn).choices(digits, k=LOTS) if case.digits else []
    fields: dict[str, Any] = {
        "max_tokens": case.tokens, "temperature": case.temperature, "ignore_eos": not case.schema,
        "grammar": from_schema(SCHEMA) if case.schema else None, "speculation": way,
        "allowed_token_ids": digits if case.digits else None,
        "logprobs": 0 if case.logprobs else None,
    }  # fmt: skip
    return [
        Request(
            id=str(i), prompt=prompt, params=SamplingParams(seed=1000 * turn + i, **fields),
            salt=f"{case.name}{turn}{way}{i}", prediction=lots,
        )
        for i in range(case.streams)
    ]  # fmt: skip


def bench_speculation(
    path: Path, name: str, threads: int | None, repeats: int, cases: Sequence[Case],
    speculation: str = "auto", draft: Path | None = None,
) -> tuple[list[Saving], dict[int, float]]:  # fmt: skip
    """Measures some cases, with drafts as `--speculation` says, and the seconds of steps by
    their rows. draft: a model that writes some. Raises ValueError if a text differs with
    speculation."""
    model = open_model(path)
    tokenizer = load_tokenizer(model.checkpoint)
    source = template_source(model.checkpoint)
    plan = make_plan(
        model.compiled, name=name, threads=threads, context=1024, speculation=speculation,
        memory="2GiB", draft=open_draft(draft) if draft is not None else None,
    )  # fmt: skip
    executable = load_executable(model, plan)
    while executable.pack_pending():
        pass
    times = row_times(executable, model.vocabulary)
    client = InProcessClient(make_engine(model, executable, plan, token_table(tokenizer)))
    template = ChatTemplate(source, tokenizer) if source else None

    def encode(text: str) -> list[int]:
        if template is None:
            return tokenizer.encode(text + CUE)
        return template.encode([message("user", text)], (), {}, generation=True, continued=False)

    digits = sorted({t for d in "0123456789" for t in tokenizer.encode(d, add_bos=False)})

    async def work() -> list[Saving]:
        try:
            return [await _saving(client, c, encode(c.text), digits, repeats) for c in cases]
        finally:
            await client.close()

    try:
        return asyncio.run(work()), times
    finally:
        if template is not None:
            template.close()


def row_times(executable: Executable, vocabulary: int) -> dict[int, float]:
    """Seconds of a step of one sequence by its rows, all of which have results; medians."""
    blocks = list(range((CONTEXT + MAX_DRAFT) // BLOCK + 1))
    tokens = [3 + i % (vocabulary - 3) for i in range(CONTEXT + MAX_DRAFT + 1)]
    executable.step(draft_input([DraftSpan(blocks, 0, tokens[:CONTEXT], GREEDY)]))
    times: dict[int, list[float]] = {rows: [] for rows in range(1, MAX_DRAFT + 2)}
    for _ in range(ROUNDS):
        for rows, found in times.items():
            span = DraftSpan(blocks, CONTEXT, tokens[CONTEXT : CONTEXT + rows], GREEDY)
            results = np.arange(rows, dtype=np.int32)
            step = replace(draft_input([span]), logits_indices=results, sampling=[GREEDY] * rows)
            began = time.perf_counter()
            executable.step(step)
            found.append(time.perf_counter() - began)
    return {rows: statistics.median(found) for rows, found in times.items()}


def error_of_median(values: Sequence[float]) -> float:
    """The standard error of the median of values that spread as a normal distribution does, nan of
    fewer than three. Their deviation is estimated by the median of distances from theirs, which
    single outliers leave alone, and which is too small of few (Croux and Rousseeuw 1992); the root
    is that of many, a tenth too large of four."""
    if (n := len(values)) < 3:
        return math.nan
    middle = statistics.median(values)
    deviation = statistics.median(abs(v - middle) for v in values) / NORMAL_DISTANCE
    return math.sqrt(math.pi / 2 / n) * deviation * FEW.get(n, n / (n - 0.8))


async def _saving(
    client: InProcessClient, case: Case, prompt: list[int], digits: list[int], repeats: int
) -> Saving:
    runs: dict[str, list[_Run]] = {way: [] for way in WAYS}
    for turn in range(repeats + 1):
        for way in WAYS if turn % 2 else WAYS[::-1]:
            params = _requests(case, prompt, digits, turn, way)
            runs[way].append(await _run(client, params))
        plain, drafted = runs["off"][-1], runs["auto"][-1]
        if plain.tokens != drafted.tokens or (case.logprobs and plain.logprobs != drafted.logprobs):
            raise ValueError(f"{case.name}: the text differs")
    off, auto = runs["off"][1:], runs["auto"][1:]  # the first warm up
    count = [sum(map(len, r.tokens)) for r in auto]
    steps = sum(r.stats["steps"] for r in auto)

    def speed(found: list[_Run]) -> float:
        pairs = zip(count, found, strict=True)
        return statistics.median((n - case.streams) / r.writing for n, r in pairs)

    def gains(seconds: Callable[[_Run], float]) -> list[float]:
        return [seconds(a) / seconds(b) for a, b in zip(off, auto, strict=True)]

    def total(kind: str) -> int:
        return sum(v for r in auto for k, v in r.stats.items() if k.startswith(kind))

    writing = gains(lambda r: r.writing)
    return Saving(
        name=case.name,
        tps=(speed(off), speed(auto)),
        gain=statistics.median(gains(lambda r: r.seconds)),
        writing=statistics.median(writing),
        writing_cpu=statistics.median(gains(lambda r: r.writing_cpu)),
        error=error_of_median(writing),
        lost=1e-6 * total("speculation_lost_us") / sum(r.writing for r in auto),
        step=sum(count) / steps / case.streams,
        drafted=total("drafted_"),
        accepted=total("accepted_"),
    )
