"""Phases that add up, time lines, and what held slow requests up."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.engine.events import Mark
from octavo.generate.gaps import BOUNDS, MOST, Gaps
from octavo.generate.quality import Quality, repeats
from octavo.generate.reply import TextDelta, Usage
from octavo.server.exchange import Exchange
from octavo.server.phases import moments, phases
from octavo.server.timelines import CAUSES, ENOUGH, RECENT, WORST, Timelines
from octavo.text import CallDelta

# When a request of 10.0 is submitted, admitted, has its first token, its last, and ends.
MOMENTS = (10.01, 10.02, 10.05, 10.25, 10.26)


def exchange(*moments: float, began: float = 10.0, **fields: Any) -> Exchange:
    submitted, admitted, first, last, ended = moments or MOMENTS
    usage = Usage(
        prompt=9, completion=4, began=began, submitted=submitted, admitted=admitted, first=first,
        last=last,
    )  # fmt: skip
    one = Exchange("/v1/completions", "POST", 200, usage=usage, model="a", began=began)
    one.ended = ended
    for name, value in fields.items():
        setattr(one, name, value)
    return one


def test_phases_follow_each_other_from_the_arrival_to_the_end() -> None:
    one = exchange()
    found = moments(one)
    assert list(found) == ["receive", "queue", "prefill", "decode", "send"]
    edges = [began for began, _ in found.values()] + [one.ended]
    assert edges == [10.0, *MOMENTS] and [e for _, e in found.values()] == edges[1:]
    assert sum(phases(one).values()) == pytest.approx(one.seconds, abs=1e-12)


def test_a_request_that_ends_early_has_no_further_phases() -> None:
    waiting = exchange(usage=Usage(submitted=10.1), ended=10.3)
    assert {n: round(s, 9) for n, s in phases(waiting).items()} == {"receive": 0.1, "queue": 0.2}
    refused = Exchange(status=404, began=10.0, ended=10.5)
    assert phases(refused) == {"receive": 0.5}


def test_gaps_are_counted_and_few_moments_kept() -> None:
    gaps, last = Gaps(), 0.0
    for i in range(10_000):
        now = 1.0 + 0.002 * i + (0.5 if i >= 7000 else 0.0)
        gaps.token(now, last)
        last = now
    assert sum(gaps.counts) == 9999 and gaps.counts[BOUNDS.index(0.0025)] == 9998
    assert gaps.longest == pytest.approx(0.502) and gaps.at == pytest.approx(15.5)
    assert gaps.total == pytest.approx(last - 1.0)
    assert MOST // 2 <= len(gaps.moments) < MOST and gaps.moments[0] == 1.0
    steps = {round(b - a, 3) for a, b in zip(gaps.moments, gaps.moments[1:], strict=False)}
    assert min(steps) == 0.002 * gaps.every


def known(lines: Timelines, count: int = ENOUGH) -> None:
    for _ in range(count):
        lines.add(exchange())


def test_a_slow_request_is_kept_with_its_cause() -> None:
    told: list[tuple[str, str]] = []
    lines = Timelines({}, lambda *slow: told.append(slow))
    known(lines)
    assert lines.worst == []
    shifts = {"receive": 0, "queue": 1, "prefill": 2, "send": 4}
    for i, (cause, at) in enumerate(shifts.items()):
        late = [m + (i + 1 if j >= at else 0) for j, m in enumerate(MOMENTS)]
        lines.add(exchange(*late, id=cause))
    assert told == [("a", cause) for cause in shifts]
    assert [line.id for line in lines.worst] == [*shifts][::-1]
    for line in lines.recent:
        assert sum(line.phases.values()) == pytest.approx(line.seconds, abs=1e-5)


def paused(**fields: Any) -> Exchange:
    one = exchange(**fields)
    assert one.usage is not None
    one.usage.gaps.token(10.05, 0.0)
    one.usage.gaps.token(10.25, 10.05)
    return one


def test_a_pause_is_blamed_on_what_was_computed_in_it() -> None:
    def cause(*marks: Mark, other: Mark | None = None) -> str | None:
        lines = Timelines({})
        known(lines)
        if other is not None:
            waiting = exchange(id="other")
            assert waiting.usage is not None
            waiting.usage.marks.append(other)
            lines.running["other"] = [{"exchange": waiting}]
        one = paused()
        assert one.usage is not None
        one.usage.marks += marks
        lines.add(one)
        return lines.recent[-1].cause

    assert cause() == "pause"
    assert cause(Mark(10.1, 0)) == "preempted"
    assert cause(other=Mark(10.1, 512)) == "other_prompt"
    assert cause(other=Mark(10.3, 512)) == "pause"
    assert {"pause", "preempted", "other_prompt"} <= set(CAUSES)


def test_what_is_kept_is_bounded() -> None:
    lines = Timelines({})
    known(lines)
    for i in range(RECENT + 50):
        late = [m + 10.0**i if i < 200 else m for m in MOMENTS]
        lines.add(exchange(*late))
    assert len(lines.recent) == RECENT and 0 < len(lines.worst) <= WORST


def signs(*deltas: TextDelta, json: bool = False) -> list[str]:
    watched = Quality(json)
    return [sign for delta in deltas for sign in watched.push(delta)]


def test_signs_of_bad_answers() -> None:
    assert signs(TextDelta(0, "", finish="stop")) == ["empty"]
    assert signs(TextDelta(0, "", finish="length")) == []
    assert signs(TextDelta(0, "fine", ids=[1, 2, 3]), TextDelta(0, "", finish="stop")) == []
    assert signs(TextDelta(0, "x", ids=[7, 8] * 40, finish="length")) == ["repetition"]
    assert signs(TextDelta(0, '{"a": '), TextDelta(0, "1}", finish="stop"), json=True) == []
    assert signs(TextDelta(0, '{"a": 1', finish="length"), json=True) == ["invalid_json"]
    calls = [CallDelta(0, "c", "f", '{"a"'), CallDelta(0, arguments=": 1}")]
    assert signs(TextDelta(0, "", calls=calls, finish="tool_calls")) == []
    assert signs(TextDelta(0, "", calls=calls[:1], finish="length")) == ["invalid_json"]


def test_repetition_is_a_piece_that_fills_the_end() -> None:
    assert repeats([5] * 32) and not repeats([5] * 31)
    assert repeats([*range(50), *([1, 2, 3] * 11)]) and not repeats(list(range(64)))
    assert repeats([*range(16)] * 4) and not repeats([*range(17)] * 3)
