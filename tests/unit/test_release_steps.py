"""Steps of a release: when they are taken, when not, and what a configuration may say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import yaml

from octavo.errors import UsageError
from octavo.release import machine
from octavo.release.guards import Figures
from octavo.release.machine import NotNow, State, act, advance, arm, shares, start
from octavo.release.spec import Guard, ReleaseSpec, convert, seconds
from octavo.release.tally import BASELINE, CANARY, STABLE, Reading, ReleaseSummary
from octavo.yaml_file import read_yaml

SPEC = ReleaseSpec(model="m", stable="old", canary="new", hold=60, max_hold=600, min_events=50)
WELL = Reading("error_rate > 0.01", Figures(100, 0.0), -2.0, 5.0)


def seen(canary: int, *readings: Reading) -> ReleaseSummary:
    return ReleaseSummary(canary, 1000, readings or (WELL,))


def test_all_steps_then_promoted() -> None:
    state, weights = start(0.0), []
    for minute in range(1, 8):
        weights.append(shares(SPEC, state)[CANARY])
        state = advance(SPEC, state, seen(100 * minute), 60.0 * minute)
        if state.phase == "promoted":
            break
    assert weights == [0.05, 0.1, 0.25, 0.5, 1.0]
    assert shares(SPEC, state) == {CANARY: 1.0} and state.since == 300.0
    assert advance(SPEC, state, seen(9999), 9999.0) == state


def test_a_step_waits_for_its_time_and_its_requests() -> None:
    first = start(0.0)
    assert advance(SPEC, first, seen(100), 59.0) == first
    assert advance(SPEC, first, seen(49), 61.0) == first
    assert advance(SPEC, first, seen(50), 61.0).step == 1
    second = advance(SPEC, first, seen(70), 61.0)
    assert advance(SPEC, second, seen(119), 200.0) == second  # 49 since the step began


def test_a_guard_rolls_back_at_once_and_for_good() -> None:
    fired = replace(WELL, evidence=5.0, figures=Figures(10, 0.4))
    for state in (start(0.0), replace(start(0.0), phase="paused")):
        ended = advance(SPEC, state, seen(10, WELL, fired), 1.0)
        assert ended.phase == "rolled_back" and shares(SPEC, ended) == {STABLE: 1.0}
        assert ended.reason == "error_rate > 0.01: canary 0.4 of 10"
        assert advance(SPEC, ended, seen(10_000), 9999.0) == ended


@pytest.mark.parametrize(("what", "phase"), [("pause", "paused"), ("rollback", "rolled_back")])
def test_what_stays_undecided_is_for_people(what: str, phase: str) -> None:
    spec = msgspec.structs.replace(SPEC, on_inconclusive=what)
    watched = seen(500, replace(WELL, evidence=2.5))
    assert advance(spec, start(0.0), watched, 599.0) == start(0.0)
    ended = advance(spec, start(0.0), watched, 600.0)
    assert (ended.phase, ended.reason) == (phase, "after 600 s: error_rate > 0.01 is undecided")
    few = advance(spec, start(0.0), seen(3), 600.0)
    assert (few.phase, few.reason) == (phase, "after 600 s: 3 of 50 requests")


def test_what_people_ask_for() -> None:
    state = act(SPEC, start(0.0), "pause", 10, 5.0, "ann")
    assert (state.phase, state.reason, state.since) == ("paused", "pause by ann", 0.0)
    assert advance(SPEC, state, seen(1000), 500.0) == state
    resumed = act(SPEC, state, "resume", 30, 500.0, "ann")
    assert resumed == State("running", 0, 500.0, 0.0, 30, "resume by ann")
    assert act(SPEC, state, "promote", 30, 500.0, "ann").step == 1
    assert act(SPEC, state, "finish", 30, 500.0, "ann").phase == "promoted"
    ended = act(SPEC, state, "rollback", 30, 500.0, "ann")
    assert ended.phase == "rolled_back"
    with pytest.raises(NotNow, match="rolled back already"):
        act(SPEC, ended, "promote", 30, 501.0, "ann")
    with pytest.raises(NotNow, match="paused already"):
        act(SPEC, state, "pause", 30, 501.0, "ann")


def test_arms_only_grow_from_their_ends() -> None:
    spec = msgspec.structs.replace(SPEC, baseline="old-2")
    units = [i / 997 for i in range(997)]
    before: dict[str, set[float]] = {CANARY: set(), BASELINE: set()}
    for step in range(len(spec.plan) - 1):
        state = State("running", step, 0.0, 0.0)
        now = {name: {u for u in units if arm(spec, state, u) == name} for name in before}
        assert all(before[name] <= now[name] for name in before)
        assert abs(len(now[CANARY]) - len(now[BASELINE])) <= 1
        before = now
    assert {arm(spec, State("running", 4, 0.0, 0.0), u) for u in units} == {CANARY}


def test_a_release_in_yaml() -> None:
    spec = convert(
        yaml.safe_load("""
        model: qwen
        stable: qwen-a
        canary: qwen-b
        steps: [{weight: 1, hold: 2m}, 25, "50%", {weight: 100, hold: 30m}]
        min_events: 200
        guards:
          - {metric: error_rate, max: 0.01, alpha: 0.004}
          - {metric: ttft_over, slo_ms: 800, max: 0.05}
          - {metric: itl_mean, worse_than_baseline: 10%, adjust: [prompt_tokens, batch]}
    """)
    )
    assert spec.plan == ((0.01, 120.0), (0.25, 300.0), (0.5, 300.0), (1.0, 1800.0))
    assert spec.alphas == (0.004, 0.003, 0.003)
    assert [g.title for g in spec.guards] == [
        "error_rate > 0.01", "ttft_over 800 ms > 0.05", "itl_mean > 1.1 x baseline",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"canary": "old"}, "different pools"),
        ({"steps": [50, 25, 100]}, "steps grow"),
        ({"steps": [50]}, "steps grow"),
        ({"steps": []}, "steps grow"),
        ({"guards": []}, "needs guards"),
        ({"guards": [{"metric": "errors"}]}, "Invalid enum value 'errors'"),
        ({"guards": [{"metric": "error_rate"}]}, "needs max or worse_than_baseline"),
        ({"guards": [{"metric": "error_rate", "max": 1.0}]}, "no rate below 1"),
        ({"guards": [{"metric": "itl_mean", "max": 1}]}, "needs worse_than_baseline"),
        ({"guards": [{"metric": "ttft_over", "max": 0.1}]}, "slo_ms belongs"),
        ({"guards": [{"metric": "error_rate", "max": 0.1, "alpha": 0.02}]}, "alphas are more"),
        ({"guards": [{"metric": "itl_mean", "worse_than_baseline": "x"}]}, "is no share"),
        ({"guards": [{"metric": "itl_mean", "worse_than_baseline": 0.1, "adjust": ["age"]}]}, "adjust knows"),
        ({"steps": [5, "nan", 100]}, "is no share"),
        ({"hold": "soon"}, "'soon' is no time"),
        ({"hold": "1.2.3s"}, "is no time"),
        ({"colour": "red"}, "unknown field `colour`"),
        ({"min_events": -1}, ">= 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused(change: dict[str, object], message: str) -> None:
    given = {"model": "m", "stable": "old", "canary": "new"} | change
    with pytest.raises(UsageError, match=re.escape(message)):
        convert(given)


@pytest.mark.parametrize("text", ["a: [", "{x: 2001-13-45}", "\0"])
def test_no_yaml(tmp_path: Path, text: str) -> None:
    file = tmp_path / "release.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match="no YAML"):
        read_yaml(file)
    with pytest.raises(UsageError, match="Expected `object`"):
        convert(None)


def test_times() -> None:
    assert [seconds(t, "x") for t in ("90s", "2m", "1.5 h", 7, "250ms")] == [90, 120, 5400, 7, 0.25]


def test_guards_share_what_no_guard_has() -> None:
    assert sum(SPEC.alphas) == pytest.approx(0.01) and SPEC.alphas[0] == 0.005
    assert Guard(metric="error_rate", max=0.01).title == "error_rate > 0.01"
    assert machine.start(3.0).began == 3.0
