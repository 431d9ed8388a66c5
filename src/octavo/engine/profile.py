"""What the main thread of a process does, call by call, for as long as it is profiled."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter_ns

import msgspec

from octavo.backends.base import Traced
from octavo.engine.call_timer import Call, CallTimer, Timed
from octavo.engine.stack_sampler import SECONDS, StackSampler

MOST_CALLS = 200_000


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


def resident() -> dict[str, int]:
    """Bytes of memory that this process has: all, and those of no file; and the most it has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = {name: text.split() for name, _, text in (line.partition(":") for line in lines)}
    names = {"resident": "VmRSS", "anonymous": "RssAnon", "peak": "VmHWM"}
    return {name: int(kib[field][0]) << 10 if field in kib else 0 for name, field in names.items()}
