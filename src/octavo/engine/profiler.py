"""What an engine's thread does, call by call, and what the threads of its kernels do."""

from __future__ import annotations

import os
from functools import reduce
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import msgspec

from octavo.backends.base import Executable, Traced
from octavo.engine import runner
from octavo.engine.call_timer import Call, CallTimer, Timed
from octavo.engine.engine import Engine
from octavo.engine.plan import Plan
from octavo.engine.stack_sampler import SECONDS, StackSampler

MOST_CALLS = 200_000
MOST_SPANS = 600_000  # of kernels, on all threads: 34 MB
# Calls of an engine, and what they are called.
PHASES = {
    "step": "step",
    "_begin_compiled": "grammars",
    "_requests.expired": "deadlines",
    "_requests.complete": "full texts",
    "scheduler.plan": "schedule",
    "scheduler.encode": "encode images",
    "scheduler.reserve": "reserve blocks",
    "_speculation.draft": "draft",
    "_compute": "compute",
    "_executable.decode": "execute",
    "_executable.run": "execute",
    "_executable.pack_pending": "pack weights",
    "_executable.prefault_kv": "prefault KV",
    "_commit_all": "commit",
    "_speculation.compare": "judge drafts",
    "_speculation.took": "judge drafts",
    "_speculation.prepare": "prepare drafts",
    "_pace.took": "pace",
    "pack_pending": "idle work",
    "stats": "count",
}


class Profile(msgspec.Struct, frozen=True):
    """A process, from `began` to `ended` by perf_counter_ns. timed: calls of its main thread.
    stacks: of that thread, and how often each was seen, every `interval` seconds. kernels: of an
    engine. memory: bytes."""

    name: str
    pid: int
    began: int
    ended: int
    timed: list[Timed]
    stacks: dict[str, int]
    memory: dict[str, int]
    interval: float = SECONDS
    isa: str = ""
    kernels: Traced | None = None


class Profiler:
    """Profiles the thread that makes it, by the calls that are given."""

    def __init__(self, name: str, calls: list[Call]) -> None:
        self._name = name
        self._timer, self._stacks = CallTimer(calls, MOST_CALLS), StackSampler()
        self._stacks.start()
        self._timer.start()
        self._began = perf_counter_ns()

    def stop(self) -> Profile:
        ended, timed = perf_counter_ns(), self._timer.stop()
        return Profile(
            self._name, os.getpid(), self._began, ended, timed, self._stacks.stop(), resident()
        )


class EngineProfiler:
    """Profiles an engine from the thread that steps it. calls: what else that thread calls."""

    def __init__(
        self, engine: Engine, executable: Executable, plan: Plan, calls: list[Call]
    ) -> None:
        self._engine, self._executable, self._plan = engine, executable, plan
        executable.start_trace(MOST_SPANS)
        self._profiler = Profiler("engine", calls + engine_calls(engine))

    def stop(self) -> Profile:
        profile = self._profiler.stop()
        return msgspec.structs.replace(
            profile, isa=self._executable.kernels, kernels=self._executable.take_trace(),
            memory=self._memory() | profile.memory,
        )  # fmt: skip

    def _memory(self) -> dict[str, int]:
        """Bytes by what they are for, as planned; and of the KV cache, what is in use."""
        plan, stats = self._plan, self._engine.stats()
        held = stats.blocks - stats.blocks_free - stats.blocks_cached
        return {
            "weights": plan.weights, "scratch": plan.buffers, "kv_cache": plan.cache,
            "kv_held": held * plan.block, "kv_prefix_cache": stats.blocks_cached * plan.block,
            "adapters": plan.adapters, "encoder": plan.encoder, "image_cache": plan.image_cache,
            "draft": plan.draft.total if plan.draft else 0, "process": plan.process,
            "planned": plan.total,
        }  # fmt: skip


def engine_calls(engine: Engine) -> list[Call]:
    """The calls of an engine that are timed."""
    calls: list[Call] = [(runner, "step_input", "record")]
    for path, label in PHASES.items():
        *owners, name = path.split(".")
        owner: Any = reduce(getattr, owners, engine)
        calls.append((owner, name, label))
    return calls


def resident() -> dict[str, int]:
    """Bytes of memory that this process has: all, and those of no file; and the most it has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = {name: text.split() for name, _, text in (line.partition(":") for line in lines)}
    names = {"resident": "VmRSS", "anonymous": "RssAnon", "peak": "VmHWM"}
    return {name: int(kib[field][0]) << 10 if field in kib else 0 for name, field in names.items()}
