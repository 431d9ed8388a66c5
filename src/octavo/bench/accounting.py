"""Where the time of a trace went: every nanosecond once, to the innermost span over it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from octavo.bench.kernels import HostLimits
from octavo.generate.trace import WAIT, TracedProcess, TraceEvent, TraceFile

IDLE = "wait for messages"  # of an engine without work
# Spans that hold others. What is left of their own is not accounted for.
HOLDERS = frozenset({"step", "report", "compute", "execute", "handle message"})


@dataclass
class SpanTime:
    """All spans of one name on one thread. seconds: within them; own: and within none of theirs;
    waited: of kernels, for other threads. The rest as in `TRACED`."""

    kind: str
    count: int = 0
    seconds: float = 0.0
    own: float = 0.0
    waited: float = 0.0
    bytes: float = 0.0
    operations: float = 0.0
    executed: float = 0.0

    def bound(self, limits: HostLimits) -> float:
        """The share of its time that the host's limits allow for what it reads and computes."""
        least = limits.seconds(self.bytes, self.executed)
        return least / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class ThreadTime:
    """Thread 0 of a process, over `seconds`; an engine has nothing to do for `idle` of them.
    spent: by the name of spans."""

    process: TracedProcess
    idle: float
    spent: dict[str, SpanTime]

    @property
    def seconds(self) -> float:
        return self.process.seconds

    @property
    def busy(self) -> float:
        return self.seconds - self.idle

    @property
    def known(self) -> float:
        """Seconds of work that spans account for by name."""
        return sum(s.own for name, s in self.spent.items() if name != IDLE and name not in HOLDERS)

    @property
    def share(self) -> float:
        return self.known / self.busy if self.busy else 0.0


def ticks(event: TraceEvent) -> tuple[int, int]:
    """Beginning and end of a span in nanoseconds, as they were measured."""
    begin = round(1000 * event.ts)
    return begin, begin + round(1000 * (event.dur or 0.0))


def nested(events: Iterable[TraceEvent]) -> Iterator[tuple[TraceEvent, int]]:
    """Spans of one thread, each with the nanoseconds that it has for itself.

    Raises ValueError for spans that overlap without one being within the other.
    """
    held: list[tuple[TraceEvent, int]] = []  # those that are open, and what their parts have taken
    timed = [(*ticks(e), e) for e in events]
    for begin, end, event in sorted(timed, key=lambda t: (t[0], -t[1])):
        while held and ticks(held[-1][0])[1] <= begin:
            yield _closed(held)
        if held:
            outer, taken = held[-1]
            if end > ticks(outer)[1]:
                raise ValueError(f"{event.name!r} ends after {outer.name!r}, which it began in")
            held[-1] = outer, taken + end - begin
        held.append((event, 0))
    while held:
        yield _closed(held)


def _closed(held: list[tuple[TraceEvent, int]]) -> tuple[TraceEvent, int]:
    event, taken = held.pop()
    begin, end = ticks(event)
    return event, end - begin - taken


def account(trace: TraceFile, process: TracedProcess) -> ThreadTime:
    """What thread 0 of a process did."""
    spans = [e for e in trace.traceEvents if e.ph == "X" and (e.pid, e.tid) == (process.pid, 0)]
    spent: dict[str, SpanTime] = {}
    for event, own in nested(spans):
        one = spent.setdefault(event.name, SpanTime(event.cat))
        one.count += 1
        one.seconds += (event.dur or 0.0) / 1e6
        one.own += own / 1e9
        one.bytes += float(event.args.get("bytes", 0))
        one.operations += float(event.args.get("operations", 0))
        one.executed += float(event.args.get("executed", 0))
    for name, seconds in _waits(spans).items():
        spent[name].waited += seconds
    return ThreadTime(process, spent[IDLE].seconds if IDLE in spent else 0.0, spent)


def _waits(spans: list[TraceEvent]) -> dict[str, float]:
    """Seconds by the kernel that was waited in: both end at once."""
    ends = {ticks(e)[1]: e.name for e in spans if e.cat == "kernel"}
    out: defaultdict[str, float] = defaultdict(float)
    for event in spans:
        if event.name == WAIT and (name := ends.get(ticks(event)[1])):
            out[name] += (event.dur or 0.0) / 1e6
    return out


def engines_of(trace: TraceFile) -> list[TracedProcess]:
    return [p for p in trace.otherData.processes if p.isa]
