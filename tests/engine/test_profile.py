"""An engine that is profiled computes the same, and all its time is in the spans."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.base import TRACED, Span, StepInput
from octavo.bench.accounting import account, nested, ticks
from octavo.engine.constraint import TokenTable
from octavo.engine.engine import Engine
from octavo.engine.events import Token
from octavo.engine.loader import load_executable, make_engine
from octavo.engine.open import open_model
from octavo.engine.plan import make_plan
from octavo.engine.profiler import EngineProfiler, engine_calls
from octavo.engine.request import Request, SamplingParams
from octavo.generate.trace import TraceEvent, trace_file
from tests.families import FAMILIES, save_family
from tests.small_models import Small, save_hf

LENGTH, LAYERS, THREADS = 24, Small().layers, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_hf(Small(), path)
    return path


def generate(engine: Engine, name: str) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    engine.add(Request(id=name, prompt=list(range(5, 45)), params=params))
    tokens = []
    while engine.has_work:
        tokens += [e.token for e in engine.step() if isinstance(e, Token)]
    return tokens


def test_a_profile_accounts_for_its_steps(folder: Path) -> None:
    opened = open_model(folder)
    plan = make_plan(opened.compiled, name="m", context=512, threads=THREADS, speculation="off")
    executable = load_executable(opened, plan)
    engine = make_engine(opened, executable, plan, TokenTable([], [], [2]))
    owners = {id(owner): (owner, set(vars(owner))) for owner, _, _ in engine_calls(engine)}
    expected = generate(engine, "before")

    profiler = EngineProfiler(engine, executable, plan, [])
    assert generate(engine, "during") == expected
    profile = profiler.stop()
    assert generate(engine, "after") == expected
    assert all(set(vars(owner)) == names for owner, names in owners.values())

    trace = trace_file([profile])
    drawn = [e for e in trace.traceEvents if e.ph == "X"]
    for thread in range(THREADS):  # nested or apart, and of each nanosecond one has it
        one = [e for e in drawn if e.tid == thread]
        assert sum(own for _, own in nested(one)) == covered(one)
    first = [e for e in drawn if e.tid == 0]
    executed = [ticks(e) for e in first if e.name == "execute"]
    for event in first:
        if event.cat == "kernel":
            begin, end = ticks(event)
            assert any(b <= begin <= end <= e for b, e in executed), event

    found = account(trace, trace.otherData.processes[0])
    steps = found.spent["plan"].count
    assert found.spent["sample"].count == steps
    assert found.spent["attention"].count == steps * LAYERS
    assert found.idle == 0 and 0 < found.share < 1
    assert found.known <= sum(s.own for s in found.spent.values()) <= found.seconds
    assert profile.memory["weights"] == plan.weights and profile.memory["kv_held"] == 0
    assert profile.isa == executable.kernels and not asdict(plan)["packed"]


def covered(events: list[TraceEvent]) -> int:
    """Nanoseconds in which there is a span."""
    total = reached = 0
    for begin, end in sorted(map(ticks, events)):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def test_what_kernels_read_is_what_there_is(folder: Path) -> None:
    """A step of one token reads every matrix once, the cached keys and values, and no more."""
    opened = open_model(folder)
    plan = make_plan(opened.compiled, name="m", context=512, threads=THREADS, speculation="off")
    executable = load_executable(opened, plan)
    engine = make_engine(opened, executable, plan, TokenTable([], [], [2]))
    while executable.pack_pending():
        pass
    generate(engine, "warm")
    executable.start_trace(10_000)
    generate(engine, "traced")
    names, threads, full = executable.take_trace()
    assert not full and len(threads) == THREADS
    rows = np.frombuffer(threads[0], TRACED)
    assert (rows["begin"] <= rows["worked"]).all() and (rows["worked"] <= rows["end"]).all()
    assert (rows["end"][:-1] <= rows["begin"][1:]).all()
    label = np.array(names)[rows["name"]]
    linear = np.char.startswith(label, "linear") | np.char.startswith(label, "gated ")
    per_step = Counter[float]()
    step = np.cumsum(label == "plan")
    for number, nbytes in zip(step[linear], rows["bytes"][linear], strict=True):
        per_step[number] += nbytes
    assert len(set(per_step.values())) == 1  # the prompt's step reads what others read
    tied = sum(k.packed for k in opened.compiled.matrices)
    assert per_step[1] == tied
    small = Small()
    attention = rows[(label == "attention") & (step == step[-1])]
    keys = 40 + LENGTH - 1
    assert attention["operations"].tolist() == [4.0 * small.head_dim * small.heads * keys] * LAYERS


def test_experts_read_what_is_counted_elsewhere(tmp_path: Path) -> None:
    save_family(FAMILIES["mixtral"], tmp_path)
    opened = open_model(tmp_path)
    plan = make_plan(opened.compiled, name="m", context=128, threads=THREADS)
    executable = load_executable(opened, plan)
    engine = make_engine(opened, executable, plan, TokenTable([], [], []))
    executable.start_trace(50_000)
    generate(engine, "experts")
    names, threads, full = executable.take_trace()
    rows = np.frombuffer(threads[0], TRACED)
    of_experts = np.char.startswith(np.array(names)[rows["name"]], "experts")
    assert not full
    assert rows["bytes"][of_experts].sum() == executable.counters.expert_bytes > 0


def test_seconds_of_a_part_of_a_step_are_of_its_operations(folder: Path) -> None:
    opened = open_model(folder)
    plan = make_plan(opened.compiled, name="m", context=512, threads=THREADS, speculation="off")
    executable = load_executable(opened, plan)
    rows = np.arange(3, dtype=np.int32)
    step = StepInput(rows + 5, rows, [Span(0, 3, 0, 0)], rows[:1], rows[-1:])
    executable.step(step)
    whole, middle = executable.counters.phases, executable.pauses[len(executable.pauses) // 2]
    executable.run(step, middle, executable.pauses[-1])
    phases = executable.counters.phases
    assert phases.keys() == whole.keys()
    assert phases["embed"] == pytest.approx(whole["embed"], rel=0.01)  # as ticks of a clock are
    assert all(phases[name] > whole[name] for name in ("attention", "select_rows"))


def test_a_trace_that_is_full_says_so(folder: Path) -> None:
    opened = open_model(folder)
    plan = make_plan(opened.compiled, name="m", context=512, threads=THREADS, speculation="off")
    executable = load_executable(opened, plan)
    engine = make_engine(opened, executable, plan, TokenTable([], [], [2]))
    executable.start_trace(20)
    generate(engine, "cut")
    names, threads, full = executable.take_trace()
    assert full and len(threads[0]) == 10 * TRACED.itemsize
    assert executable.take_trace() == ([], [], False)
