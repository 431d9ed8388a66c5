"""Steps that take longer than their like did: seen at once, forgotten slowly, and not confused with more texts."""

from __future__ import annotations

from octavo.engine.slowdown import ENOUGH, HALF, Slowdown


def steps(one: Slowdown, texts: int, seconds: float, count: int, now: float) -> float:
    """So many steps, one after the other. Gives when the last ended."""
    for _ in range(count):
        now += seconds
        one.record(texts, seconds, now)
    return now


def test_slow_steps_are_seen_at_once_and_for_long() -> None:
    one = Slowdown()
    now = steps(one, 1, 0.01, 100, 0.0)
    assert one.times == 1
    now = steps(one, 1, 0.05, 40, now)
    assert 4.9 < one.times < 5
    now = steps(one, 1, 0.05, int(600 / 0.05), now)
    assert 3 < one.times < 5  # ten minutes later
    steps(one, 1, 0.05, int(6 * HALF / 0.05), now)
    assert one.times < 1.1  # by then it is usual


def test_more_texts_are_no_slowdown() -> None:
    """Even with the first step of each number."""
    one = Slowdown()
    now = steps(one, 1, 0.01, 100, 0.0)
    for texts in range(2, 20):
        now = steps(one, texts, 0.01 * texts, ENOUGH + 5, now)
        assert one.times == 1


def test_one_long_step_is_no_slowdown() -> None:
    one = Slowdown()
    now = steps(one, 1, 0.01, 100, 0.0)
    steps(one, 1, 10.0, 1, now)
    assert one.times < 1.2
