"""Profiles without an engine: clocks that come off again, traces, and the sums made of them."""

from __future__ import annotations

import json
import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.backends.base import TRACED, Traced
from octavo.bench.accounting import SpanTime, account, nested
from octavo.bench.kernels import HostLimits
from octavo.engine.call_timer import CallTimer
from octavo.engine.profile import Profile, resident
from octavo.engine.stack_sampler import StackSampler
from octavo.generate.trace import TraceEvent, TraceFile, trace_file

STEP = 1_000_000  # ns


class Worker:
    def outer(self) -> str:
        return self.inner(1) + self.inner(2)

    def inner(self, n: int) -> str:
        if n > 2:
            raise ValueError(n)
        return "x" * n


def test_clocks_are_put_on_and_taken_off() -> None:
    worker, other = Worker(), Worker()
    calls = [(worker, "outer", "outer"), (worker, "inner", lambda n: f"inner {n}")]
    timer = CallTimer(calls, most=5)
    timer.start()
    assert worker.outer() == other.outer() == "xxx"
    with pytest.raises(ValueError):
        worker.inner(3)
    other_thread = threading.Thread(target=worker.outer)
    other_thread.start()
    other_thread.join()
    worker.outer()  # of which one call is kept
    timed = timer.stop()
    assert [label for label, _, _ in timed] == ["inner 1", "inner 2", "outer", "inner 3", "inner 1"]
    (_, a, b), (_, c, d), (_, begin, end), *_ = timed
    assert begin <= a <= b <= c <= d <= end
    assert vars(worker) == {} and worker.outer() == "xxx"


def test_clocks_of_classes_come_off_too() -> None:
    before = Worker.inner
    timer = CallTimer([(Worker, "inner", "inner")], most=9)
    timer.start()
    Worker().outer()
    assert len(timer.stop()) == 2
    assert Worker.inner is before


def test_stacks_are_of_the_thread_that_asked() -> None:
    sampler, seen = StackSampler(), threading.Event()
    sampler.start()

    def busy() -> None:
        while not sampler._counts:
            seen.wait(0.001)

    busy()
    (stack, *_) = sampler.stop()
    assert "test_stacks_are_of_the_thread_that_asked" in stack
    assert any(frame.endswith(".<locals>.busy") for frame in stack.split(";"))


def spans(*rows: tuple[int, ...]) -> bytes:
    return np.array([r + (0.0,) * (7 - len(r)) for r in rows], TRACED).tobytes()


@pytest.fixture
def trace() -> TraceFile:
    """A step of 1 ms: 0.1 ms to schedule, 0.8 ms to execute, of which two kernels take 0.75."""
    timed = [
        ("schedule", 100, 100 + STEP // 10),
        ("execute", STEP // 10 + 200, STEP * 9 // 10 + 200),
        ("step", 50, 50 + STEP),
        ("wait for messages", 2 * STEP, 4 * STEP),
    ]
    first, second = STEP // 10 + 300, STEP // 10 + 300 + STEP // 2
    end = first + STEP * 3 // 4
    kernels = Traced(
        ["linear 4->8", "attention"],
        [
            spans((0, first, second - 5000, second, 3e6, 4e6, 8e6), (1, second, end, end)),
            spans((0, first, second, second), (1, second, end - 2000, end)),
        ],
        False,
    )
    engine = Profile("engine", 7, 0, 4 * STEP, timed, {"a;b": 3}, {"weights": 9}, isa="scalar", kernels=kernels)  # fmt: skip
    front = Profile("front", 6, 10, 4 * STEP, [("detokenize", 20, 40)], {}, {})
    return trace_file([front, engine])


def test_a_trace_is_what_viewers_read(trace: TraceFile) -> None:
    written = json.loads(msgspec.json.encode(trace))
    assert msgspec.json.decode(msgspec.json.encode(trace), type=TraceFile) == trace
    assert written["displayTimeUnit"] == "ms"
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in written["traceEvents"] if e["name"] == "thread_name"}  # fmt: skip
    assert names == {(6, 0): "front, thread 0", (7, 0): "engine, thread 0", (7, 1): "thread 1"}
    drawn = [e for e in written["traceEvents"] if e["ph"] == "X"]
    assert len(drawn) == 1 + 4 + 4 + 2  # the last: waits of more than a microsecond
    for event in drawn:
        assert event["ts"] >= 0 and event["dur"] >= 0
        assert {"name", "cat", "pid", "tid"} <= event.keys()
    (linear,) = [e for e in drawn if e["name"] == "linear 4->8" and e["tid"] == 0]
    assert linear["args"] == {"bytes": 3e6, "operations": 4e6, "executed": 8e6}
    assert (linear["ts"], linear["dur"]) == (100.3, 500.0)


def test_a_full_trace_ends_where_it_adds_up() -> None:
    timed = [("execute", 0, 50), ("schedule", 50, 60), ("execute", 60, 200), ("step", 0, 300)]
    rows = (0, 10, 30, 30), (0, 30, 45, 45), (0, 70, 80, 80)
    kernels = Traced(["linear"], [spans(*rows), spans(*rows[:2], (0, 75, 90, 90))], True)
    made = Profile("engine", 7, 0, 400, timed, {}, {}, isa="scalar", kernels=kernels)
    trace = trace_file([made])
    (engine,) = trace.otherData.processes
    assert engine.cut and engine.seconds == 80 / 1e9
    drawn = [(e.name, e.tid) for e in trace.traceEvents if e.ph == "X"]
    assert drawn == [("execute", 0), ("schedule", 0), *[("linear", 0)] * 3, *[("linear", 1)] * 2]
    assert round(1e9 * account(trace, engine).spent["linear"].seconds) == 20 + 15 + 10


def test_every_nanosecond_is_counted_once(trace: TraceFile) -> None:
    front, engine = trace.otherData.processes
    found = account(trace, engine)
    own = {name: round(1e9 * s.own) for name, s in found.spent.items()}
    assert own == {
        "step": STEP // 10, "schedule": STEP // 10,
        "execute": STEP * 8 // 10 - STEP * 3 // 4, "linear 4->8": STEP // 2 - 5000,
        "attention": STEP // 4, "wait for threads": 5000, "wait for messages": 2 * STEP,
    }  # fmt: skip
    assert found.idle == 2 * STEP / 1e9 and found.busy == 2 * STEP / 1e9
    assert found.share == pytest.approx((STEP // 10 + STEP * 3 // 4) / (2 * STEP))
    assert round(1e9 * found.spent["linear 4->8"].waited) == 5000
    assert account(trace, front).spent["detokenize"].count == 1


def test_spans_that_cross_are_refused() -> None:
    def span(begin: float, end: float) -> TraceEvent:
        return TraceEvent("x", "X", 1, 0, "python", begin, end - begin)

    assert [own for _, own in nested([span(0, 1), span(0.25, 0.5), span(1, 2)])] == [250, 750, 1000]
    with pytest.raises(ValueError, match="ends after"):
        list(nested([span(0, 1), span(0.5, 1.5)]))


@pytest.mark.parametrize(("read", "computed", "share"), [(2e9, 0.0, 0.5), (0.0, 3e9, 0.75), (2e9, 3e9, 0.75)])  # fmt: skip
def test_a_roof_is_memory_or_arithmetic(read: float, computed: float, share: float) -> None:
    limits = HostLimits("scalar", 1, read_gbs=4.0, registers_gops=4.0, widest_gops=4.0)
    spent = SpanTime("kernel", seconds=1.0, bytes=read, executed=computed)
    assert spent.bound(limits) == share


def test_memory_of_this_process_is_known() -> None:
    found: dict[str, Any] = resident()
    assert found["peak"] >= found["resident"] > found["anonymous"] > 1 << 20
