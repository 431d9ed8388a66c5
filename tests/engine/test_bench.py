"""`octavo bench engine` and `bench decoding`: any client is measured, and by its engine's own times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.backends.base import Counters
from octavo.backends.cpu.executor import host_isa
from octavo.bench.decoding import FIRST, TOKENS, batch, step_ms
from octavo.bench.engine import bench_engine, measure, random_requests, run_requests
from octavo.client.base import EngineClient
from octavo.engine.events import Ended, Times, Token, TokenEvent
from octavo.engine.request import Request
from octavo.errors import EngineFailed
from tests.engine.test_clients import NAMES, Clients

AUTO = "int16" if host_isa() == "amx" else "auto"  # tiles multiply two digits at little cost
STEP, NATIVE, LOOP = 0.004, 0.003, 0.001  # seconds: of a step, of its native part, between two


class Metronome(Clients):
    """Computes a token of every request in each step, by a clock of its own."""

    def __init__(self, ends_early: bool = False) -> None:
        super().__init__()
        self.stats = dict.fromkeys(NAMES, 0)
        self.native = Counters(0, 0.0, {}, 0)
        self.clock = 100.0
        self.ends_early = ends_early
        self._step: asyncio.Task[None] | None = None
        self._queues: dict[str, asyncio.Queue[float]] = {}

    async def _steps(self) -> None:
        while True:
            for _ in range(4):  # all that have come, and a moment for those who read
                await asyncio.sleep(0)
            if not self._queues:
                break
            self.clock += STEP + LOOP
            self.stats = self.stats | {
                "steps": self.stats["steps"] + 1,
                "busy_us": self.stats["busy_us"] + round(1e6 * STEP),
                "generated_tokens": self.stats["generated_tokens"] + len(self._queues),
            }
            n = self.native
            self.native = Counters(
                n.steps + 1, n.seconds + NATIVE, {"linear": n.seconds + NATIVE}, n.expert_bytes + 5_000_000
            )  # fmt: skip
            for queue in self._queues.values():
                queue.put_nowait(self.clock)
        self._step = None

    async def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        if self.ends_early:
            yield Ended(request.id, "error")
            return
        queued, first = self.clock, 0.0
        self._queues[request.id] = queue = asyncio.Queue()
        self._step = self._step or asyncio.ensure_future(self._steps())
        for i in range(request.params.max_tokens or 0):
            now = await queue.get()
            first = first or now
            last = i + 1 == request.params.max_tokens
            if last:
                del self._queues[request.id]
            times = Times(queued, queued, first, now)
            yield Token(request.id, 5, finish="length" if last else None, times=times)


def test_any_client_is_measured_by_its_own_times() -> None:
    """The steps' time is the engine's; what lies between them is overhead."""
    client = Metronome()
    run = asyncio.run(run_requests(client, random_requests(100, 4, 7, 10), lambda: client.native))
    assert len(run.tokens) == 4 * 10 == client.stats["generated_tokens"]
    assert run.ended.tokens - run.prefilled.tokens == 4 * 9
    assert run.decode_tps == pytest.approx(4 / STEP)
    assert run.overhead == pytest.approx(100 * (1 - NATIVE / (STEP + LOOP)))
    assert run.ttft_ms == pytest.approx(1000 * (STEP + LOOP))
    assert run.phases == {"linear": pytest.approx(100)} and run.expert_mb == pytest.approx(5)


def test_figures_of_a_batch() -> None:
    made: list[Metronome] = []

    def client() -> EngineClient:
        made.append(Metronome())
        return made[-1]

    found = asyncio.run(measure(client, lambda: made[-1].native, 100, 3, 50, 6, 2))
    assert (found.batch, found.prompt, found.output) == (3, 50, 6)
    assert found.prefill_tps == pytest.approx(3 * 50 / (STEP + LOOP))
    assert found.decode_tps == pytest.approx(3 / STEP) and found.phases == {"linear": 100.0}
    assert len(made) == 3 and all(c.closed for c in made)
    single = asyncio.run(measure(client, lambda: made[-1].native, 100, 3, 50, 1, 1))
    assert (single.decode_tps, single.overhead) == (0.0, 0.0)


def test_steps_that_are_faster_than_events() -> None:
    """Where all has ended before anybody looks, times say how fast it was."""
    client = Metronome()
    requests = random_requests(100, 2, 7, 10)
    run = asyncio.run(run_requests(client, requests, lambda: client.native))
    run = replace(run, prefilled=run.ended, measured=run.began)
    assert run.decode_tps == pytest.approx(2 / (STEP + LOOP))
    assert run.overhead == pytest.approx(100 * (1 - NATIVE / (STEP + LOOP)))


def test_a_way_of_decoding_is_measured_by_its_steps() -> None:
    client = Metronome()
    assert asyncio.run(step_ms(client, batch([5, 6]))) == pytest.approx(1000 * STEP)
    assert client.stats["steps"] == FIRST + TOKENS


def test_a_request_that_fails_fails_the_measurement() -> None:
    client = Metronome(ends_early=True)
    requests = random_requests(100, 2, 7, 10)
    for work in (run_requests(client, requests, lambda: client.native), step_ms(client, requests)):
        with pytest.raises(EngineFailed):
            asyncio.run(work)


def test_a_real_engine(smollm2: Path) -> None:
    report = bench_engine(smollm2, "smollm2", [1, 3], 20, 8, 2, 1)
    assert [(r.batch, r.prompt, r.output) for r in report.runs] == [(1, 20, 8), (3, 20, 8)]
    assert (report.activations, report.kv_dtype) == (AUTO, "bf16")
    for r in report.runs:
        assert min(r.prefill_tps, r.decode_tps, r.ttft_ms) > 0 and 0 < r.overhead < 100
        assert 0 < sum(r.phases.values()) <= 100 + 0.05 * len(r.phases)  # each is rounded
        # The first tokens of all came no later than their prompts were computed together.
        assert r.ttft_ms <= 1000 * r.batch * r.prompt / r.prefill_tps * 1.001
