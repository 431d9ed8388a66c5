"""Circuit breakers and retries, on a clock that the test moves."""

from __future__ import annotations

import pytest

from octavo.balance.breaker import Breaker, BreakerLimits
from octavo.balance.retry import Backoff, RetryBudget


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_failures_in_a_row_open_it_and_one_probe_closes_it() -> None:
    clock = Clock()
    breaker = Breaker(clock, BreakerLimits(consecutive=3, open_seconds=2))
    for _ in range(3):
        assert (breaker.state, breaker.begin(), breaker.available) == ("closed", False, True)
        breaker.failed()
    assert (breaker.state, breaker.begin()) == ("open", False)
    breaker.succeeded()  # a request from before: no probe
    clock.now = 1.99
    assert (breaker.state, breaker.begin()) == ("open", False)
    clock.now = 2
    assert breaker.state == "half-open"
    assert [breaker.begin(), breaker.begin()] == [True, False]
    breaker.cancelled()  # others end meanwhile, which is no business of the probe's
    breaker.failed()
    breaker.succeeded()
    assert (breaker.state, breaker.available) == ("half-open", False)
    breaker.succeeded(probe=True)
    assert (breaker.state, breaker.ratio, breaker.available) == ("closed", 0, True)


def test_probes_that_fail_come_less_often_up_to_a_limit() -> None:
    clock = Clock()
    breaker = Breaker(clock, BreakerLimits(consecutive=1, open_seconds=1, most_seconds=4))
    breaker.failed()
    for pause in (1, 2, 4, 4, 4):
        clock.now += pause - 0.01
        assert (breaker.state, breaker.begin()) == ("open", False)
        clock.now += 0.01
        assert (breaker.state, breaker.begin()) == ("half-open", True)
        breaker.failed(probe=True)


def test_a_probe_that_is_cancelled_leaves_room_for_another() -> None:
    clock = Clock()
    breaker = Breaker(clock, BreakerLimits(consecutive=1))
    breaker.failed()
    clock.now = 1
    assert breaker.begin()
    breaker.cancelled(probe=True)
    assert breaker.state == "half-open" and breaker.begin()


def test_a_share_of_failures_opens_it_once_there_are_enough_results() -> None:
    clock = Clock()
    breaker = Breaker(clock, BreakerLimits(ratio=0.5, volume=8, consecutive=100))
    for i in range(7):
        breaker.succeeded() if i % 2 else breaker.failed()
    assert breaker.state == "closed" and breaker.ratio > 0.5
    breaker.failed()
    assert breaker.state == "open"


def test_what_was_long_ago_counts_less() -> None:
    clock = Clock()
    breaker = Breaker(clock, BreakerLimits(ratio=0.5, volume=4, consecutive=100, half_life=1))
    for _ in range(3):
        breaker.failed()
    clock.now = 10
    for _ in range(3):
        breaker.succeeded()
    breaker.failed()
    assert breaker.state == "closed" and breaker.ratio == pytest.approx(0.25, abs=0.01)


def test_tries_are_spread_and_doubled() -> None:
    backoff = Backoff()
    assert [backoff.delay(n, 1.0) for n in (1, 2, 3)] == [1, 2, 4]
    assert [backoff.delay(n, 0.5) for n in (1, 2, 3)] == [0.5, 1, 2]
    assert backoff.delay(1, 0.25, retry_after=3) == 3
    assert [backoff.delay(1, 0.25, wish) for wish in (31, float("inf"), float("nan"))] == [None] * 3
    assert backoff.delay(4, 1.0) is None


def test_retries_are_a_tenth_of_the_requests_of_late() -> None:
    clock = Clock()
    budget = RetryBudget(clock, least=1)
    assert [budget.retry(), budget.retry()] == [True, False]
    for _ in range(100):
        budget.request()
    assert [budget.retry() for _ in range(11)] == [True] * 9 + [False] * 2
    clock.now = 1000  # requests and retries of long ago are as good as none
    assert budget.retry() and not budget.retry()
