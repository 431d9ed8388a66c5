"""What two models do as they are served, each in an engine process of its own, by turns: seconds to
load, tokens a second, memory, and the texts they continue."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from octavo.backends.base import BLOCK
from octavo.client.event_loop import EventLoop
from octavo.client.process import EngineProcessClient
from octavo.compress.distributions import Precision
from octavo.engine.constraint import TokenTable
from octavo.engine.events import Times, Token
from octavo.engine.open import OpenModel
from octavo.engine.plan import Plan, make_plan
from octavo.engine.request import Request, SamplingParams

_PEAK = re.compile(r"VmHWM:\s+(\d+) kB")


@dataclass(frozen=True)
class ServingFigures:
    """One model, served. outputs: greedy continuations of the prompts; peak_rss: bytes."""

    load_seconds: float
    prefill_tps: float
    decode_tps: float
    peak_rss: int
    outputs: list[list[int]]


def serve_both(
    models: tuple[OpenModel, OpenModel], prompts: list[list[int]], output: int, threads: int | None,
    precision: Precision, progress: Callable[[int], Any] = lambda _: None,
) -> tuple[ServingFigures, ServingFigures]:  # fmt: skip
    """Has both continue every prompt by `output` tokens, the one first, then the other.

    precision: of the first. progress: told of every prompt that both have continued. Raises
    OctavoError.
    """
    context = max(map(len, prompts)) + output
    a, b = (
        _Engine(m, _plan(m, context, threads, given))
        for m, given in zip(models, (precision, Precision()), strict=True)
    )

    async def measure() -> tuple[ServingFigures, ServingFigures]:
        await a.start()
        await b.start()
        for i, prompt in enumerate(prompts):
            for engine in (a, b) if i % 2 else (b, a):  # neither is always the first
                await engine.complete(prompt, output)
            progress(1)
        return a.served(), b.served()

    async def close() -> None:
        await a.close()
        await b.close()

    loop = EventLoop()
    try:
        return loop.run(measure())
    finally:  # not by those who measure: an interrupt cancels them
        loop.finish(close)


def _plan(model: OpenModel, context: int, threads: int | None, precision: Precision) -> Plan:
    """A plan with the KV cache of one context: what an engine keeps beyond that is its choice."""
    plan = make_plan(
        model.compiled, name=model.checkpoint.path.name, context=context, threads=threads,
        encoder=model.encoder, **asdict(precision),
    )  # fmt: skip
    blocks = (context + BLOCK - 1) // BLOCK
    return replace(plan, limits=replace(plan.limits, blocks=blocks), cache=blocks * plan.block)


class _Engine:
    """An engine process, and what it has done."""

    def __init__(self, model: OpenModel, plan: Plan) -> None:
        path, files = str(model.checkpoint.path), model.checkpoint.states
        self._client = EngineProcessClient(path, plan, model.vocabulary, files=files)
        self._seconds = 0.0  # to load
        self._prefill: list[float] = []
        self._decode: list[float] = []
        self._outputs: list[list[int]] = []

    async def start(self) -> None:
        self._client.use(TokenTable([], [], []))
        began = time.perf_counter()
        await self._client.start()
        self._seconds = time.perf_counter() - began

    async def close(self) -> None:
        await self._client.close()

    async def complete(self, prompt: list[int], output: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        request = Request(id=str(len(self._outputs)), prompt=prompt, params=params)
        tokens, times = [], Times()
        async for event in self._client.submit(request):
            if isinstance(event, Token):
                tokens.append(event.token)
                times = event.times
        self._outputs.append(tokens)
        self._prefill.append(len(prompt) / max(1e-9, times.first_token - times.admitted))
        if len(tokens) > 1:
            self._decode.append((len(tokens) - 1) / max(1e-9, times.last_token - times.first_token))

    def served(self) -> ServingFigures:
        return ServingFigures(
            self._seconds, statistics.median(self._prefill), statistics.median(self._decode),
            peak_rss(self._client.pid), self._outputs,
        )  # fmt: skip


def peak_rss(pid: int | None) -> int:
    """Most bytes of memory that a process has had, 0 if it is gone."""
    try:
        found = _PEAK.search(Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
