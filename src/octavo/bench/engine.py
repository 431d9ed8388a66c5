"""Prefill and decode speed of one engine in this process, without HTTP."""

from __future__ import annotations

import platform
import random
import resource
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from octavo.backends.base import Executable
from octavo.engine.engine import Engine
from octavo.engine.loader import load_executable, open_model
from octavo.engine.plan import make_plan
from octavo.engine.request import Request, SamplingParams


@dataclass(frozen=True)
class Measurement:
    """One batch size. prefill_tps: prompt tokens over the time until every request has its first
    token; decode_tps: later tokens over the time they took; ttft_ms: mean time to first token.
    overhead: percent of decoding spent outside native steps (scheduler, Python). phases: percent of
    native decoding by kind of operation. expert_mb: weights of experts read in a decoding step."""

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
    """Measurements of one model on one machine. `dataclasses.asdict` is what --json writes."""

    machine: Machine
    model: ModelSize
    runs: list[Measurement]


def _run_once(
    engine: Engine,
    executable: Executable,
    vocabulary: int,
    batch: int,
    prompt: int,
    output: int,
) -> tuple[tuple[float, ...], dict[str, float]]:
    rng = random.Random(batch * 1000 + prompt)
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    for i in range(batch):
        ids = [rng.randrange(3, vocabulary) for _ in range(prompt)]
        engine.add(Request(id=str(i), prompt=ids, params=params))
    began = time.perf_counter()
    first: dict[str, float] = {}
    before = total = 0
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            first.setdefault(event.id, now)
            total += 1
        if len(first) == batch and not before:
            prefilled, before, start = now, total, executable.counters
    ended = time.perf_counter()
    end = executable.counters
    native, spent = end.seconds - start.seconds, ended - prefilled
    experts = (end.expert_bytes - start.expert_bytes) / max(1, end.steps - start.steps) / 1e6
    prefill = batch * prompt / (prefilled - began)
    decode = (total - before) / spent if total > before else 0.0
    ttft = 1000 * statistics.mean(t - began for t in first.values())
    shares = {
        k: 100 * (v - start.phases.get(k, 0.0)) / max(native, 1e-9) for k, v in end.phases.items()
    }
    return (prefill, decode, ttft, 100 * (1 - native / spent), experts), shares


def measure(
    executable: Executable, vocabulary: int, batch: int, prompt: int, output: int, repeats: int
) -> Measurement:
    """Medians over `repeats` runs, after one run to warm up; no prefix is reused."""
    context = prompt + output
    runs = []
    for i in range(repeats + 1):
        engine = Engine(executable, vocabulary, context, frozenset(), prefix_caching=False)
        once, phases = _run_once(engine, executable, vocabulary, batch, prompt, output)
        if i:
            runs.append(once)
    prefill, decode, ttft, overhead, experts = (
        round(statistics.median(column), 2) for column in zip(*runs, strict=True)
    )
    rss = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    phases = {name: round(share, 1) for name, share in phases.items()}
    return Measurement(
        batch, prompt, output, prefill, decode, ttft, overhead, rss, experts, phases
    )  # fmt: skip


def machine(executable: Executable) -> Machine:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(
        (line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), ""
    )
    return {
        "cpu": cpu, "system": platform.platform(), "isa": executable.kernels,
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
    activations: str = "int16",
) -> Report:
    """Measures the given batch sizes, one after another."""
    opened = open_model(path)
    plan = make_plan(
        opened.compiled, name=name, threads=threads, kv_dtype=kv_dtype, activations=activations
    )
    executable = load_executable(opened, plan)
    while executable.pack_pending():
        pass
    runs = [measure(executable, opened.vocabulary, b, prompt, output, repeats) for b in batches]
    size: ModelSize = {"name": name, "bytes": opened.checkpoint.nbytes}
    return Report(machine(executable), size, runs)
