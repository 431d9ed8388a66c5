"""Prefill and decode speed of one engine in this process, without HTTP.

An engine is measured as everything above it is served: through its client. Its speed is that of its
own steps; what lies between them, such as handing over tokens, is in `overhead`.
"""

from __future__ import annotations

import asyncio
import platform
import random
import resource
import statistics
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import uvloop

from octavo.backends.base import Counters, Executable
from octavo.client.base import EngineClient
from octavo.client.in_process import InProcessClient
from octavo.engine.constraint import TokenTable
from octavo.engine.events import Ended, Times, Token
from octavo.engine.loader import load_executable, make_engine
from octavo.engine.open import open_model
from octavo.engine.plan import make_plan
from octavo.engine.request import Request, SamplingParams
from octavo.errors import EngineFailed
from octavo.generate.output import failure


@dataclass(frozen=True)
class Measurement:
    """One batch size. prefill_tps: prompt tokens over the time until every request has its first
    token; decode_tps: later tokens over the time of their steps; ttft_ms: mean time to first token.
    overhead: percent of decoding spent outside native steps (scheduler, Python, the client).
    phases: percent of native decoding by kind of operation. expert_mb: weights of experts read in a
    decoding step."""

    batch: int
    prompt: int
    output: int
    prefill_tps: float
    decode_tps: float
    ttft_ms: float
    overhead: float
    rss_mb: float
    expert_mb: float
    phases: dict[str, float]


class Machine(TypedDict):
    """What a measurement ran on."""

    cpu: str
    system: str
    isa: str
    threads: int


class ModelSize(TypedDict):
    """A model's name and the bytes of its tensors."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Report:
    """Measurements of one model on one machine. activations, kv_dtype: what was computed with,
    `auto` resolved. `dataclasses.asdict` is what --json writes."""

    machine: Machine
    model: ModelSize
    activations: str
    kv_dtype: str
    runs: list[Measurement]


@dataclass(frozen=True)
class Moment:
    """What an engine had done by then: steps, tokens, seconds in steps; native: in native code."""

    steps: int
    tokens: int
    busy: float
    native: Counters


@dataclass(frozen=True)
class Run:
    """Requests that ran together, each to its last token.

    times: of each. tokens: when each of all tokens was sampled, in order. began, prefilled, ended:
    before, when it was seen that every request had a token, and after. measured: when native
    counters were of the same step as the statistics for the first time after `prefilled`; `began`
    if they never were, because steps are shorter than an event takes.
    """

    times: Sequence[Times]
    tokens: Sequence[float]
    began: Moment
    prefilled: Moment
    measured: Moment
    ended: Moment

    @property
    def admitted(self) -> float:
        """When the first step was planned."""
        return min(t.admitted for t in self.times)

    @property
    def prefill_seconds(self) -> float:
        """Until every request had its first token."""
        return max(t.first_token for t in self.times) - self.admitted

    @property
    def decode_tps(self) -> float:
        """Tokens after the first ones a second of the engine's steps; of time, where the requests
        had ended before it was seen that they had begun."""
        if tokens := self.ended.tokens - self.prefilled.tokens:
            return tokens / (self.ended.busy - self.prefilled.busy)
        first = max(t.first_token for t in self.times)
        tokens = sum(at > first for at in self.tokens)
        return tokens / (self.tokens[-1] - first) if tokens else 0.0

    @property
    def overhead(self) -> float:
        """Percent of the time since `measured` that was not spent in native steps."""
        known = self.measured.tokens - self.began.tokens
        seconds = self.tokens[-1] - (self.tokens[known - 1] if known else self.admitted)
        native = self.ended.native.seconds - self.measured.native.seconds
        return 100 * (1 - native / seconds) if seconds else 0.0

    @property
    def ttft_ms(self) -> float:
        return 1000 * statistics.mean(t.first_token - self.admitted for t in self.times)

    @property
    def expert_mb(self) -> float:
        before, after = self.measured.native, self.ended.native
        steps = max(1, after.steps - before.steps)
        return (after.expert_bytes - before.expert_bytes) / steps / 1e6

    @property
    def phases(self) -> dict[str, float]:
        """Percent of native time since `measured` by kind of operation. A step may have been under
        way then, so shares are of what was counted."""
        before = self.measured.native.phases
        spent = {k: v - before.get(k, 0) for k, v in self.ended.native.phases.items()}
        total = max(sum(spent.values()), 1e-9)
        return {k: 100 * v / total for k, v in spent.items()}


async def run_requests(
    client: EngineClient, requests: Sequence[Request], counters: Callable[[], Counters]
) -> Run:
    """Runs requests that come together. Raises RequestError.

    Times are the engine's own. counters: of what computes for the client, which may be a step
    ahead of the client's statistics for a moment.
    """
    times: dict[str, Times] = {}
    tokens: list[float] = []
    prefilled: Moment | None = None
    measured: Moment | None = None

    def moment() -> Moment:
        stats, native = client.stats, counters()
        return Moment(stats["steps"], stats["generated_tokens"], stats["busy_us"] / 1e6, native)

    async def read(request: Request) -> None:
        nonlocal prefilled, measured
        async with aclosing(client.submit(request)) as events:
            async for event in events:
                if isinstance(event, Ended) and (error := failure(event)):
                    raise error
                if isinstance(event, Token):
                    times[request.id] = event.times
                    tokens.append(event.times.last_token)
                    if measured is None and len(times) == len(requests):
                        now = moment()
                        prefilled = prefilled or now
                        if now.native.steps - began.native.steps == now.steps - began.steps:
                            measured = now

    began = moment()
    await asyncio.gather(*map(read, requests))
    if len(times) < len(requests):
        raise EngineFailed("a request ended without a token", code="engine_error")
    ended = moment()
    return Run(
        list(times.values()), sorted(tokens), began, prefilled or ended, measured or began, ended
    )


def random_requests(vocabulary: int, batch: int, prompt: int, output: int) -> list[Request]:
    """Requests with prompts of random tokens, always the same."""
    rng = random.Random(batch * 1000 + prompt)
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    prompts = [[rng.randrange(3, vocabulary) for _ in range(prompt)] for _ in range(batch)]
    return [Request(id=str(i), prompt=ids, params=params) for i, ids in enumerate(prompts)]


async def measure(
    make_client: Callable[[], EngineClient], counters: Callable[[], Counters], vocabulary: int,
    batch: int, prompt: int, output: int, repeats: int,
) -> Measurement:  # fmt: skip
    """Medians over `repeats` runs, after one run to warm up, each on a client of its own."""
    requests = random_requests(vocabulary, batch, prompt, output)
    runs = []
    for i in range(repeats + 1):
        client = make_client()
        try:
            run = await run_requests(client, requests, counters)
        finally:
            await client.close()
        if i:
            runs.append(run)

    def median(value: Callable[[Run], float]) -> float:
        return round(statistics.median(map(value, runs)), 2)

    return Measurement(
        batch=batch, prompt=prompt, output=output,
        prefill_tps=median(lambda r: batch * prompt / r.prefill_seconds),
        decode_tps=median(lambda r: r.decode_tps),
        ttft_ms=median(lambda r: r.ttft_ms),
        overhead=median(lambda r: r.overhead),
        rss_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        expert_mb=median(lambda r: r.expert_mb),
        phases={name: round(share, 1) for name, share in runs[-1].phases.items()},
    )  # fmt: skip


def processor() -> str:
    """What the host's CPU calls itself."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), ""
    )


def machine(executable: Executable) -> Machine:
    return {
        "cpu": processor(), "system": platform.platform(), "isa": executable.kernels,
        "threads": executable.threads,
    }  # fmt: skip


def bench_engine(
    path: Path,
    name: str,
    batches: list[int],
    prompt: int,
    output: int,
    threads: int | None,
    repeats: int,
    kv_dtype: str = "auto",
    activations: str = "auto",
) -> Report:
    """Measures the given batch sizes, one after another; no prefix is reused."""
    opened = open_model(path)
    plan = make_plan(
        opened.compiled, name=name, threads=threads, kv_dtype=kv_dtype, activations=activations,
        encoder=opened.encoder,
        speculation="off",
    )  # fmt: skip
    executable = load_executable(opened, plan)
    while executable.pack_pending():
        pass
    table = TokenTable([], [], [])  # no text is read or constrained

    def client() -> EngineClient:
        return InProcessClient(make_engine(opened, executable, plan, table, prefix_caching=False))

    async def runs() -> list[Measurement]:
        return [
            await measure(
                client, lambda: executable.counters, opened.vocabulary, b, prompt, output, repeats
            )
            for b in batches
        ]

    size: ModelSize = {"name": name, "bytes": opened.checkpoint.nbytes}
    return Report(machine(executable), size, plan.activations, plan.kv_dtype, uvloop.run(runs()))
