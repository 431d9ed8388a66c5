"""What an engine's thread does, call by call, and what the threads of its kernels do."""

from __future__ import annotations

from functools import reduce
from typing import Any

import msgspec

from octavo.backends.base import Executable
from octavo.engine import runner
from octavo.engine.call_timer import Call
from octavo.engine.engine import Engine
from octavo.engine.plan import Plan
from octavo.engine.profile import Profile, Profiler

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
