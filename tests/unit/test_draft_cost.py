"""What drafts are worth, what they cost, and how deep a step verifies them."""

from __future__ import annotations

import random

import pytest

from octavo.engine.cost import LEAST_GAIN, MOST_ROW, ROW, Acceptance, CostModel, StepTimes
from octavo.engine.drafts import (
    BEGINS,
    GOES_ON,
    LONGEST_MATCH,
    MAX_DRAFT,
    Proposal,
)


def proposal(match: int = 2, tokens: int = MAX_DRAFT) -> Proposal:
    return Proposal("lookup", list(range(tokens)), match)


def test_acceptance_is_learned_by_match_and_by_request() -> None:
    known = Acceptance()
    good, bad, new = Acceptance(known), Acceptance(known), Acceptance(known)
    before = new.chances(proposal())
    assert before == sorted(before, reverse=True)
    for _ in range(40):
        good.compare(proposal(), list(range(MAX_DRAFT)))
        bad.compare(proposal(), [99])
    assert good.chances(proposal())[-1] > 0.5 > 0.2 > bad.chances(proposal())[0]
    assert bad.chance("lookup", 2) < new.chance("lookup", 2) < good.chance("lookup", 2)
    assert bad.chance("recent", 2) == new.chance("recent", 2)
    assert new.chance("forced", 0) == 1.0


def test_where_a_value_begins_and_where_it_goes_on_is_judged_apart() -> None:
    """Under a grammar that forces the text before: its quote is as before, what it says is not."""
    known, value = Acceptance(), Proposal("lookup", [1, 2, 3], LONGEST_MATCH, place=BEGINS)
    for _ in range(40):
        known.compare(value, [1, 9])
        known.compare(value._replace(place=GOES_ON), [9])
    assert known.chances(value)[0] > 0.95 and known.chances(value)[1:2] < [0.1]
    assert known.chance("lookup", LONGEST_MATCH, GOES_ON) < 0.05
    assert known.chance("lookup", LONGEST_MATCH) == 0.9  # of other text nothing was seen


def test_what_was_not_compared_is_not_counted() -> None:
    """A token after the first that was not drawn says nothing about the chain."""
    one, other = Acceptance(), Acceptance()
    one.compare(Proposal("lookup", [1, 2, 3], 9), [1, 5, 3])
    other.compare(Proposal("lookup", [1, 2], 9), [1, 5])
    assert one._seen == other._seen


def model(times: dict[int, float]) -> CostModel:
    made = CostModel()
    for rows, seconds in times.items():
        made.times.record(rows, seconds, 0.0)
    return made


def test_depth_is_the_one_that_gives_most_tokens_a_second() -> None:
    rng = random.Random(2)
    for _ in range(200):
        count = rng.randrange(1, 4)
        times = {count: 1.0}
        for rows in range(count + 1, count + 13):
            times[rows] = times[rows - 1] + rng.random() * 0.3
        chances = [
            sorted((rng.random() for _ in range(rng.randrange(5))), reverse=True)
            for _ in range(count)
        ]
        got = model(times).depths(chances, count, 12, 0.0)

        def rate(
            depths: list[int], chances: list[list[float]] = chances, times: dict[int, float] = times
        ) -> float:
            return (
                len(depths) + sum(sum(c[:d]) for c, d in zip(chances, depths, strict=True))
            ) / times[len(depths) + sum(depths)]

        every: list[list[int]] = [[]]
        for c in chances:
            every = [[*e, d] for e in every for d in range(len(c) + 1)]
        best = max(map(rate, every))
        worth = best > LEAST_GAIN * rate([0] * count)
        assert rate(got) == pytest.approx(best if worth else rate([0] * count))


def test_nothing_is_verified_that_does_not_pay() -> None:
    chances = [[0.9, 0.8, 0.7]]
    assert CostModel().depths(chances, 1, 15, 0.0) == [0]  # no step was measured yet
    assert model({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}).depths(chances, 1, 15, 0.0) == [0]
    assert model({1: 1.0}).depths(chances, 1, 15, 0.0) == [3]
    assert model({1: 1.0}).depths(chances, 1, 2, 0.0) == [2]
    assert model({1: 1.0}).depths([[]], 1, 15, 0.0) == [0]
    assert model({8: 1.0}).depths([[0.9]] * 8, 8, 24, 0.0) == [1] * 8
    assert model({8: 1.0, 9: 1.5, 16: 1.9}).depths([[0.9]] * 8, 8, 24, 0.0) == [0] * 8


def test_times_between_and_beyond_those_measured() -> None:
    times = StepTimes()
    assert times.plain(1) is None
    times.record(1, 1.0, 0.0)
    assert times.estimate(9, 1, 0.0) == pytest.approx((1 + 9 * ROW) / (1 + ROW))
    times.record(3, 1.5, 0.0)  # three quarters for all, a quarter for each row
    times.record(7, 2.5, 0.0)
    assert times.estimate(5, 1, 0.0) == pytest.approx(2.0)
    assert times.estimate(3, 1, 0.0) == pytest.approx(1.5)
    assert times.plain(2) == pytest.approx(1.25)
    assert times.estimate(15, 1, 0.0) == pytest.approx(4.5)
    long_ago = (1 + 3 * ROW) / (1 + ROW)
    assert times.estimate(3, 1, 1e6) == pytest.approx(long_ago)  # it is tried again
    times.record(3, 1e9, 0.0)  # one that was held up
    assert times.estimate(3, 1, 0.0) < 2
    times.record(12, 1e9, 0.0)  # the first was held up
    assert times.estimate(12, 1, 0.0) == pytest.approx(5.0)
    times.record(31, 1e9, 0.0)
    most = (1 + 31 * MOST_ROW) / (1 + 12 * MOST_ROW)
    assert times.estimate(31, 1, 0.0) == pytest.approx(5.0 * most)


@pytest.mark.parametrize("row", [0.0, 0.05, 0.3, 0.9])
def test_what_a_row_takes_is_learned_from_any_two_steps(row: float) -> None:
    """Where arithmetic is what takes time, deep drafts are not tried to find that out."""
    times = StepTimes()
    for rows in (2, 4):
        times.record(rows, 1 + row * rows, 0.0)
    for rows in (1, 3, 8, 16, 40):
        assert times.plain(rows) == pytest.approx(1 + row * rows)
    assert times.estimate(16, 2, 0.0) == pytest.approx(1 + row * 16)


def test_a_first_row_that_was_held_up_does_not_end_likely_drafts() -> None:
    policy = CostModel()
    policy.times.record(1, 1.0, 0.0)
    policy.times.record(2, 50.0, 0.0)
    assert policy.depths([[0.9, 0.85, 0.8]], 1, 15, 0.0) != [0]


def test_a_draft_model_writes_as_much_as_gives_most_tokens_a_second() -> None:
    rng = random.Random(4)
    for _ in range(200):
        count = rng.randrange(1, 4)
        likely = [rng.random() for _ in range(count)]
        each, once = rng.random() * 0.5, rng.random()
        made = model({n: 1.0 + 0.1 * n for n in range(count, count + 30)})

        def rate(depth: int, likely: list[float] = likely, count: int = count) -> float:
            tokens = count + sum(sum(c**k for k in range(1, depth + 1)) for c in likely)
            written = once + depth * each if depth else 0.0  # noqa: B023
            return tokens / (1.0 + 0.1 * count * (depth + 1) + written)

        free: list[list[float]] = [[] for _ in likely]
        got = made.ahead(likely, free, count, 12, 0.0, lambda k: once + k * each, MAX_DRAFT)  # noqa: B023
        best = max(range(12 // count + 1), key=rate)
        assert got == (best if rate(best) > LEAST_GAIN * rate(0) else 0)


def test_a_draft_model_is_not_asked_where_what_is_found_is_better() -> None:
    made = model({n: 1.0 + 0.1 * n for n in range(1, 20)})
    found = [[0.99**k for k in range(1, 16)]]
    assert made.ahead([0.6], [[]], 1, 15, 0.0, lambda k: 0.05 * k, MAX_DRAFT) > 1
    assert made.ahead([0.6], [[]], 1, 15, 0.0, lambda k: 0.05 * k, 1) == 1  # may be wrong
    assert made.ahead([0.6], found, 1, 15, 0.0, lambda k: 0.05 * k, MAX_DRAFT) == 0
    unmeasured = CostModel()
    assert unmeasured.ahead([0.6], [[]], 1, 15, 0.0, lambda k: 0.0, MAX_DRAFT) == 0


def test_chances_of_what_a_draft_model_writes_follow_its_own_probabilities() -> None:
    known = Acceptance()
    sure, unsure = (Proposal("draft", [1, 2], 0, [p, p]) for p in (0.97, 0.12))
    assert known.chances(sure)[0] == pytest.approx(0.95) and known.chances(unsure)[0] < 0.2
    for _ in range(300):
        known.compare(sure, [9])
        known.compare(unsure, [1, 2])
    assert known.chances(sure)[:1] < known.chances(unsure)[:1]
    assert known.any("draft") == pytest.approx(2 / 3, abs=0.02) and known.any("self") == 0.7


def test_a_step_that_was_held_up_is_tried_again() -> None:
    policy = CostModel()
    policy.times.record(1, 1.0, 0.0)
    policy.times.record(2, 9.0, 0.0)  # of which a step twice as long is believed
    assert policy.affordable(1, 0.0, 0.0, MAX_DRAFT) == 0
    policy.times.record(1, 1.0, 20.0)
    assert policy.affordable(1, 20.0, 0.0, MAX_DRAFT) > 0
    assert policy.depths([[0.9]], 1, 1, 20.0) == [1]


def test_as_many_tokens_may_be_wrong_as_a_request_may_lose() -> None:
    policy = CostModel()
    assert policy.affordable(1, 0.0, 0.0, MAX_DRAFT) == MAX_DRAFT  # no step was measured yet
    policy.times.record(1, 1.0, 0.0)
    assert policy.affordable(1, 0.0, -5.0, MAX_DRAFT) == 0
    assert policy.affordable(1, 0.0, 0.0, MAX_DRAFT) == 3  # of 0.2 / 1.2 each
    assert policy.affordable(3, 0.0, 0.0, MAX_DRAFT) == 1  # beside two others
    assert policy.affordable(1, 0.0, 0.51, MAX_DRAFT) == 6
    assert policy.affordable(1, 0.0, 0.51, 5) == 5  # there are no more
