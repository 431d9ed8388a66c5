"""Profiles as a trace: the JSON that ui.perfetto.dev and chrome://tracing open.

Times are microseconds since the first profile began. Spans of one thread are nested or apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from octavo.backends.base import TRACED, Traced
from octavo.engine.profile import MOST_CALLS, Profile

SHORTEST_WAIT = 1000  # ns: a shorter one is no span of its own
WAIT = "wait for threads"
Kind = Literal["python", "kernel", "wait", "__metadata"]


class TraceEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A span (`X`) of a thread, or the name of a process or thread (`M`). args: of kernels the
    bytes, operations and byte operations that they take, over all threads."""

    name: str
    ph: Literal["X", "M"]
    pid: int
    tid: int
    cat: Kind
    ts: float = 0.0
    dur: float | None = None
    args: dict[str, float | str] = {}


class TracedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """began: microseconds since the trace began. isa, threads: of an engine's kernels. memory:
    bytes. stacks: Python frames from the outermost, joined by `;`, and how often they were seen,
    every `interval` seconds. cut: it ends before the profile did, for there were too many spans."""

    name: str
    pid: int
    began: float
    seconds: float
    isa: str
    threads: int
    cut: bool
    memory: dict[str, int]
    interval: float
    stacks: dict[str, int]


class Rest(msgspec.Struct, frozen=True):
    """What viewers do not draw."""

    processes: list[TracedProcess]


class TraceFile(msgspec.Struct, frozen=True):
    """What the file holds."""

    traceEvents: list[TraceEvent]
    otherData: Rest
    displayTimeUnit: Literal["ms", "ns"] = "ms"


def trace_file(profiles: Sequence[Profile]) -> TraceFile:
    """One trace of all that was profiled."""
    zero = min(p.began for p in profiles)
    kept = [_added_up(p) for p in profiles]
    events = [event for p in kept for event in _events(p, zero)]
    cut = [p is not q for p, q in zip(profiles, kept, strict=True)]
    return TraceFile(events, Rest([_process(*each, zero) for each in zip(kept, cut, strict=True)]))


def _added_up(p: Profile) -> Profile:
    """A profile until one of its lists was full: what came after would not add up."""
    ends = []
    if len(p.timed) == MOST_CALLS:
        ends.append(p.timed[-1][2])
    if p.kernels is not None and p.kernels.full:
        longest = max(p.kernels.threads, key=len)
        ends.append(int(np.frombuffer(longest, TRACED)["end"][-1]))
    if not ends:
        return p
    end, kernels = min(ends), p.kernels
    if kernels is not None:
        rows = [np.frombuffer(data, TRACED) for data in kernels.threads]
        kernels = kernels._replace(threads=[r[r["end"] <= end].tobytes() for r in rows])
    timed = [call for call in p.timed if call[2] <= end]
    return msgspec.structs.replace(p, ended=end, timed=timed, kernels=kernels)


def _process(p: Profile, cut: bool, zero: int) -> TracedProcess:
    return TracedProcess(
        name=p.name, pid=p.pid, began=(p.began - zero) / 1000, seconds=(p.ended - p.began) / 1e9,
        isa=p.isa, threads=max(1, len(p.kernels.threads)) if p.kernels else 1,
        cut=cut, memory=p.memory, interval=p.interval, stacks=p.stacks,
    )  # fmt: skip


def _events(p: Profile, zero: int) -> Iterator[TraceEvent]:
    yield TraceEvent("process_name", "M", p.pid, 0, "__metadata", args={"name": f"octavo {p.name}"})
    yield TraceEvent(
        "thread_name", "M", p.pid, 0, "__metadata", args={"name": f"{p.name}, thread 0"}
    )
    for label, began, ended in p.timed:
        yield _span(label, p.pid, 0, "python", began - zero, ended - zero)
    if p.kernels is not None:
        yield from _kernels(p.kernels, p.pid, zero)


def _span(
    name: str, pid: int, thread: int, kind: Kind, began: int, ended: int, **args: float | str
) -> TraceEvent:
    return TraceEvent(name, "X", pid, thread, kind, began / 1000, (ended - began) / 1000, args)


def _kernels(traced: Traced, pid: int, zero: int) -> Iterator[TraceEvent]:
    for thread, data in enumerate(traced.threads):
        if thread:
            name: dict[str, float | str] = {"name": f"thread {thread}"}
            yield TraceEvent("thread_name", "M", pid, thread, "__metadata", args=name)
        for name_, begin, worked, end, *cost in np.frombuffer(data, TRACED).tolist():
            args: dict[str, Any] = {}
            if cost[1]:
                args = dict(zip(("bytes", "operations", "executed"), cost, strict=True))
            label = traced.names[name_]
            yield _span(label, pid, thread, "kernel", begin - zero, end - zero, **args)
            if end - worked >= SHORTEST_WAIT:
                yield _span(WAIT, pid, thread, "wait", worked - zero, end - zero)
