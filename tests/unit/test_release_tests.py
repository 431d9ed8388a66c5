"""The tests that guard releases: what they find, what they leave alone, sums that add up."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.release import betting, moments
from octavo.release.answers import repeating
from octavo.release.divergence import token_kl
from octavo.release.events import RequestEvent
from octavo.release.guards import ShareTest, make_test
from octavo.release.spec import Guard, ReleaseSpec
from octavo.release.tally import CANARY, STABLE, Rows, Tally, add

SPEC = ReleaseSpec(
    model="m", stable="old", canary="new",
    guards=(
        Guard(metric="error_rate", max=0.01),
        Guard(metric="error_rate", worse_than_baseline="50%"),
        Guard(metric="ttft_over", slo_ms=800, max=0.05),
        Guard(metric="itl_mean", worse_than_baseline="10%", adjust=("prompt_tokens",)),
        Guard(metric="empty_rate", max=0.02),
        Guard(metric="repeat_rate", max=0.05),
        Guard(metric="shadow_kl", max=0.03),
    ),
).check()  # fmt: skip


def rate_evidence(bad: Any, count: Any, limit: float) -> Any:
    """The evidence of `bad` ones among `count` values that are 0 or 1."""
    one, zero = betting.gains(1.0, limit), betting.gains(0.0, limit)
    bad, good = np.asarray(bad)[..., None], np.asarray(count - bad)[..., None]
    return betting.evidence(bad * one + good * zero)


def test_evidence_is_the_mixture_of_likelihood_ratios() -> None:
    """Of 3 errors in 20 against 1 %, worked out the other way."""
    rates = 0.01 + betting.FRACTIONS * 0.99
    ratios = (rates / 0.01) ** 3 * ((1 - rates) / 0.99) ** 17
    assert rate_evidence(3, 20, 0.01) == pytest.approx(math.log(ratios.mean()), rel=1e-12)


def test_no_bet_gains_on_average_at_the_limit() -> None:
    for limit in (0.001, 0.01, 0.3, 0.99):
        mean = limit * np.exp(betting.gains(1.0, limit)) + (1 - limit) * np.exp(betting.gains(0.0, limit))  # fmt: skip
        assert np.allclose(mean, 1, rtol=1e-12)


def test_money_that_waits_is_never_more_than_all() -> None:
    assert betting.since_any_time(np.zeros(1)) == pytest.approx(0, abs=1e-12)
    assert betting.since_any_time(np.zeros(57)) == pytest.approx(0, abs=1e-12)


def test_a_sound_rate_is_left_alone_and_a_broken_one_found() -> None:
    """1,000 runs of 1,000 requests, looked at after every one, right at the limit and above."""
    rng, needed, count = np.random.default_rng(5), math.log(100), np.arange(1, 1001)

    def found(rate: float, runs: int) -> np.ndarray:
        bad = (rng.random((runs, 1000)) < rate).cumsum(axis=1)
        over = rate_evidence(bad, count, 0.01) >= needed
        return np.where(over.any(axis=1), over.argmax(axis=1) + 1, 10_000)

    assert (found(0.01, 1000) < 10_000).mean() <= 0.01
    after = found(0.3, 200)
    assert after.max() < 100 and np.median(after) <= 10


def test_errors_of_both_alike_are_no_evidence() -> None:
    """An upstream that fails for everybody rolls nothing back; one that fails for the canary does."""
    rng, test = np.random.default_rng(2), make_test(Guard(metric="error_rate", worse_than_baseline=0.5))  # fmt: skip
    assert isinstance(test, ShareTest)

    def evidence(canary: float, stable: float) -> float:
        row = np.zeros(test.size)
        for new, draw in zip(rng.random(4000) < 0.1, rng.random(4000), strict=True):
            failed = bool(draw < (canary if new else stable))
            test.observe(row, RequestEvent("", 0, failed=failed), bool(new), 0.1)
        return test.evidence(row[None], np.zeros(1))

    assert evidence(0.3, 0.3) < 0 < math.log(1000) < evidence(0.3, 0.02)


def test_covariates_take_their_part_of_the_spread_away() -> None:
    rng = np.random.default_rng(3)

    def group(shift: float) -> moments.Moments:
        z = rng.standard_normal(4000)
        return moments.Moments.of(np.column_stack((z + 0.5 * rng.standard_normal(4000) + shift, z)))

    one, other = group(0.2), group(0.0)
    gap = moments.difference(one, other)
    assert gap.explained == pytest.approx(1 / 1.25, abs=0.02)
    assert abs(gap.mean - 0.2) < 4 * math.sqrt(gap.variance)


def test_evidence_of_a_mean_is_that_of_its_mixture() -> None:
    """The closed form beside the integral over all effects that are looked for."""
    mean, variance, scale = 0.07, 0.001, 0.1
    effect = np.linspace(0, 1.5, 200_001)
    density = 2 * np.exp(-(effect**2) / (2 * scale**2)) / (scale * math.sqrt(2 * math.pi))
    ratio = np.exp((mean * effect - effect**2 / 2) / variance)
    integral = math.log(np.trapezoid(density * ratio, effect))
    assert moments.mean_evidence(mean, variance, scale) == pytest.approx(integral, rel=1e-6)
    assert moments.mean_evidence(-50, 1e-4, scale) < -4  # far away on the sound side


EVENTS = st.builds(
    RequestEvent,
    st.sampled_from([CANARY, STABLE, "other"]), st.floats(0, 4000), st.integers(0, 4),
    st.booleans(), st.floats(0.01, 5), st.floats(0.001, 1), empty=st.booleans(),
    repeating=st.booleans(), prompt_tokens=st.integers(1, 1000),
    kl=st.one_of(st.none(), st.floats(0, 2)),
)  # fmt: skip


@given(st.lists(st.tuples(EVENTS, st.integers(0, 2)), max_size=60))
def test_gateways_add_up_to_one(events: list[tuple[RequestEvent, int]]) -> None:
    tally = Tally(SPEC)
    one: Rows = {}
    several: list[Rows] = [{}, {}, {}]
    for event, gateway in events:
        tally.observe(one, event, 0.0)
        tally.observe(several[gateway], event, 0.0)
    total: Rows = {}
    for rows in several:
        add(total, rows)
    assert total.keys() == one.keys()
    for key in one:
        assert np.allclose(total[key], one[key], rtol=1e-9, atol=1e-9)
    for a, b in zip(tally.read(total).readings, tally.read(one).readings, strict=True):
        assert a.title == b.title and a.evidence == pytest.approx(b.evidence, rel=1e-6, abs=1e-6)


def test_latencies_do_not_count_while_caches_are_cold() -> None:
    tally, rows = Tally(SPEC), Rows()
    for at in (0.0, 89.0, 91.0):
        tally.observe(rows, RequestEvent(CANARY, at, failed=False, ttft=9.0, itl=0.1), 0.0)
    seen = {r.title: r.figures.count for r in tally.read(rows).readings}
    assert seen["ttft_over 800 ms > 0.05"] == seen["itl_mean > 1.1 x baseline"] == 1
    assert seen["error_rate > 0.01"] == 3


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("the cat sat on the mat and looked at the moon for a long while", False),
        ("ha ha ha ha", False),
        ("well " + "no " * 30, True),
        ("once " + "upon a time there was " * 6, True),
        ("once " + "upon a time there was " * 6 + "a king", False),
    ],
)
def test_answers_that_go_in_circles(words: str, found: bool) -> None:
    assert repeating(words.split()) is found


@given(st.data(), st.integers(2, 40), st.integers(1, 20))
def test_what_versions_tell_of_tokens_is_no_more_than_they_differ(
    data: Any, size: int, told: int
) -> None:
    """The divergence of the likeliest tokens is at most that of all, and all of it if all are told."""
    weights = st.lists(st.floats(1e-3, 1), min_size=size, max_size=size)
    old, new = (np.log(w / w.sum()) for w in (np.array(data.draw(weights)) for _ in range(2)))
    true = float((np.exp(old) * (old - new)).sum())

    def top(logs: Any, count: int) -> dict[int, float]:
        return {int(t): float(logs[t]) for t in np.argsort(logs)[-count:]}

    assert 0 <= token_kl(top(old, told), top(new, told)) <= true + 1e-9
    assert token_kl(top(old, size), top(new, size)) == pytest.approx(true, abs=1e-9)
    assert token_kl(top(old, told), top(old, told)) == 0
