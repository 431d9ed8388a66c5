"""The promise: tokens and log-probabilities depend on the request alone, bit for bit."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Q
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.backends.base import ProgramOptions, StepLimits
from octavo.backends.cpu import CpuExecutable, load, lower
from octavo.checkpoint import open_checkpoint
from octavo.engine.engine import Engine
from octavo.engine.events import Token
from octavo.engine.request import Request, SamplingParams
from octavo.generate.load import ACTIVATIONS
from octavo.models import build_program
from tests.families import FAMILIES, save_family
from tests.quantized_models import WRITERS, quantize_folder
from tests.small_models import Small, save_gguf, save_hf

Output = list[tuple[int | None, float, list[tuple[int, float]], str | None]]


class Pool:
    """Executables of one model, made once per shape."""

    def __init__(self, path: Path, kv_dtype: str = "bf16") -> None:
        self.kv_dtype = kv_dtype
        self.lowered = lower(build_program(open_checkpoint(path)))
        self.executable = cache(self._executable)

    def _executable(self, blocks: int, threads: int, activations: str) -> CpuExecutable:
        limits = StepLimits(256, 16, blocks)
        options = ProgramOptions(limits, threads, self.kv_dtype, activations=activations)
        return load(self.lowered, options)

    def engine(
        self, blocks: int = 400, threads: int = 2, activations: str = "auto", **options: Any
    ) -> Engine:
        program = self.lowered.program
        executable = self.executable(blocks, threads, activations)
        return Engine(executable, program.vocabulary, program.context, frozenset({2}), **options)


def drive(
    engine: Engine, requests: list[Request], rng: random.Random | None = None
) -> dict[str, Output]:
    """Runs requests to their ends; with `rng`, they arrive and are preempted at random moments."""
    waiting = list(requests)
    out: dict[str, Output] = {r.id: [] for r in requests}
    preemptions = 6  # bounded: without a cache, a sequence preempted too often never catches up
    while waiting or engine.has_work:
        while waiting and (rng is None or not engine.has_work or rng.random() < 0.3):
            engine.add(waiting.pop(0))
        if rng and preemptions and engine.scheduler.running and rng.random() < 0.1:
            preemptions -= 1
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        if rng and rng.random() < 0.05:
            engine.index.evict()
        for e in engine.step():
            assert isinstance(e, Token)
            out[e.id].append((e.token, e.logprob, e.top, e.finish))
    stats = engine.stats()
    assert stats.blocks_held == 0 and stats.running == stats.waiting == 0
    return out


def some_requests(seed: int, count: int, vocabulary: int, longest: int, room: int) -> list[Request]:
    """Requests that share prefixes of all lengths, greedy and sampled, with and without penalties.

    Where none has any, their steps may follow each other in a row.
    """
    rng = random.Random(seed)
    penalties = rng.random() < 0.5
    base = [rng.randrange(3, vocabulary) for _ in range(longest)]
    requests = []
    for i in range(count):
        shared = base[: rng.randrange(1, longest)]
        prompt = (shared + [rng.randrange(3, vocabulary) for _ in range(rng.choice([0, 1, 30]))])[
            :room
        ]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 24),
            temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            min_p=rng.choice([0.0, 0.05]),
            seed=rng.randrange(1 << 60),
            repetition_penalty=rng.choice([1.0, 1.3]) if penalties else 1.0,
            frequency_penalty=rng.choice([0.0, 0.5]) if penalties else 0.0,
            stop_token_ids=rng.sample(range(3, vocabulary), rng.choice([0, 0, 20])),
            logit_bias=rng.choice([{}, {5: 3.0}]),
            logprobs=3,
            ignore_eos=True,
        )
        requests.append(
            Request(id=str(i), prompt=prompt, params=params, priority=rng.choice([0, 0, 1]))
        )
    return requests


def alone(pool: Pool, requests: list[Request], activations: str = "auto") -> dict[str, Output]:
    """Each request by itself on a fresh engine, step by step, without a prefix cache."""
    out = {}
    for r in requests:
        engine = pool.engine(activations=activations, prefix_caching=False, multi_step=0.0)
        out |= drive(engine, [r])
    return out


# Each: a shape and a cache, or a family and the format that its matrices are stored in.
MATRIX = [
    "llama", "llama-int8", "llama-mqa", "gemma3", "gemma2", "gpt-oss", "qwen3-moe gptq-8", "llama gptq-4-act-order",
    "phi3 fp8-row",
]  # fmt: skip


def made(name: str, folder: Path) -> Pool:
    """One of MATRIX, written into a folder."""
    family, _, format = name.partition(" ")
    if format or family in ("gemma2", "gpt-oss"):
        save_family(FAMILIES[family], folder)
        if format:
            quantize_folder(folder, WRITERS[format], lambda name: "proj" in name)
        return Pool(folder)
    if family == "gemma3":
        save_hf(Small(family="gemma3", heads=4, kv_heads=2, layers=6, window=40), folder)
        return Pool(folder)
    heads, kv_heads = (20, 1) if family == "llama-mqa" else (6, 2)  # 20 rows: two items
    save_gguf(Small(heads=heads, kv_heads=kv_heads, head_dim=16), folder / "m.gguf", Q.Q4_1)
    return Pool(folder / "m.gguf", "int8" if family == "llama-int8" else "bf16")


@pytest.fixture(scope="module", params=MATRIX)
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return made(request.param, tmp_path_factory.mktemp("model"))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 12),
    threads=st.sampled_from([1, 2]),
    budget=st.sampled_from([5, 16, 33, 256]),
    blocks=st.sampled_from([45, 60, 400]),
    prefix_caching=st.booleans(),
    multi_step=st.sampled_from([0.0, 10.0]),
    activations=st.sampled_from(ACTIVATIONS),
)
def test_nothing_but_the_request_matters(
    pool: Pool,
    seed: int,
    count: int,
    threads: int,
    budget: int,
    blocks: int,
    prefix_caching: bool,
    multi_step: float,
    activations: str,
) -> None:
    requests = some_requests(seed, count, 320, 600, 660)
    expected = alone(pool, requests, activations)
    rng = random.Random(seed)
    shuffled = rng.sample(requests, len(requests))
    engine = pool.engine(
        blocks, threads, activations, budget=budget, prefix_caching=prefix_caching,
        multi_step=multi_step,
    )  # fmt: skip
    assert drive(engine, shuffled, rng) == expected
    assert drive(engine, requests, rng) == expected  # and again, with whatever the cache now holds


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_real_model(activations: str, smollm2: Path) -> None:
    pool = Pool(smollm2)
    requests = some_requests(3, 10, 49152, 400, 440)
    expected = alone(pool, requests, activations)
    for options in (
        {},
        {"threads": 1, "blocks": 40},
        {"budget": 19},
        {"prefix_caching": False, "blocks": 40},
    ):
        engine = pool.engine(activations=activations, **options)
        assert drive(engine, requests[::-1]) == expected
        assert drive(engine, requests) == expected


@pytest.mark.parametrize("position", [0, 1, 5])
def test_resumed_requests_continue(pool: Pool, position: int) -> None:
    """A request replayed with the tokens already given continues with the very next one."""
    import msgspec

    (request,) = some_requests(11, 1, 320, 100, 100)
    params = msgspec.structs.replace(request.params, max_tokens=12, temperature=1.0)
    request = msgspec.structs.replace(request, params=params)
    whole = drive(pool.engine(), [request])[request.id]
    given_tokens = [t for t, *_ in whole[:position]]
    resumed = msgspec.structs.replace(request, resume=given_tokens)
    assert drive(pool.engine(), [resumed])[request.id] == whole[position:]
