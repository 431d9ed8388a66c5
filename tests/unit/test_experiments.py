"""What experiments say: right when there is nothing, right when there is something, and honest."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from benchmarks.experiments import mismatched, narrower, peeked

from octavo.errors import UsageError
from octavo.experiments.analysis import (
    LEAST,
    analyse,
    comparable,
    compare,
    half_width,
    linear,
    multinomial_evidence,
)
from octavo.experiments.bodies import altered
from octavo.experiments.plan import plan, rate_plan
from octavo.experiments.report import page
from octavo.experiments.spec import ExperimentSpec, Variant, convert
from octavo.experiments.totals import Totals, Units
from octavo.release.events import RequestEvent

SPEC = ExperimentSpec(
    id="e", model="m", variants={"a": Variant(weight=50), "b": Variant(weight=50)}, control="a",
    metrics=("ttft", "error_rate"),
)  # fmt: skip


def totals(effect: float, units: int, only: str = "") -> Totals:
    """Users with a few requests each, whose TTFT goes with their prompts."""
    rng, found = np.random.default_rng(11), Totals()
    for unit in range(units):
        variant = only or "ab"[unit % 2]
        own = rng.lognormal(6, 0.5)
        for _ in range(rng.integers(1, 4)):
            prompt = int(own * rng.lognormal(0, 0.2))
            ttft = prompt / 2000 + rng.exponential(0.05) + (effect if variant == "b" else 0)
            event = RequestEvent("", 0, ttft=ttft, prompt_tokens=prompt)
            found.observe(SPEC, variant, f"u{unit}", event)
    return found


def test_nothing_is_found_where_nothing_is() -> None:
    """200 A/A experiments, looked at after every one of 2,000 units."""
    found, fixed = peeked(np.random.default_rng(1), 200, 2000)
    assert found <= 0.05 < 0.25 < fixed  # the intervals of one look are of no use here


def units_of_one_value(values: np.ndarray) -> Units:
    one = np.ones(len(values))
    return Units(one, values, np.zeros((len(values), 0)), one)


def test_rates_that_are_rare_are_found_no_more_often() -> None:
    """40 A/A experiments with 2 % failures and a tenth of the units for b, looked at every 5."""
    rng, found = np.random.default_rng(1), 0
    for _ in range(40):
        b, failed = rng.random(1000) < 0.1, (rng.random(1000) < 0.02).astype(float)
        for n in range(200, 1001, 5):
            sides = [units_of_one_value(failed[:n][b[:n] == side]) for side in (True, False)]
            if (
                min(map(len, sides)) >= LEAST
                and compare([(sides[0], sides[1])], "x", "b", 0.05, 5000).decided
            ):
                found += 1
                break
    assert found <= 2


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, 3.3])
def test_values_that_are_all_the_same_differ_in_nothing(value: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        sides = []
        for n in rng.integers(20, 400, 2):
            counts, tokens = rng.integers(1, 6, n), rng.lognormal(6, 1, (n, 1))
            sums = np.array([sum([value] * int(count)) for count in counts])
            sides.append(Units(counts.astype(float), sums, tokens, counts.astype(float)))
        assert not compare([(sides[0], sides[1])], "thumbs", "b", 0.05, 5000).decided


def test_shares_that_are_not_as_they_should_be() -> None:
    rng = np.random.default_rng(2)
    assert mismatched(rng, 20, 4000, 0.5) == 0
    assert mismatched(rng, 20, 4000, 0.44) == 1
    assert (
        multinomial_evidence([50, 50], [0.5, 0.5]) < 0 < multinomial_evidence([90, 10], [0.5, 0.5])
    )


def test_cuped_makes_intervals_narrower() -> None:
    assert narrower(np.random.default_rng(3), 4000) > 0.3
    one = analyse(SPEC, totals(0.0, 400).of).comparisons[0]
    plain = analyse(msgspec.structs.replace(SPEC, cuped=()), totals(0.0, 400).of).comparisons[0]
    assert one.high - one.low < 0.7 * (plain.high - plain.low)
    assert one.explained > 0.5 and plain.explained == 0 and not one.decided


def test_a_slower_variant_is_found() -> None:
    first = analyse(SPEC, totals(0.05, 600).of).comparisons[0]
    assert first.decided and first.low < 0.05 < first.high
    assert (first.units, first.control_units) == (300, 300)


def test_users_are_counted_not_requests() -> None:
    """Each user's value a thousand times says no more than once."""
    rng = np.random.default_rng(4)
    values, none = rng.standard_normal(500) + 3, np.zeros((500, 0))
    once = Units(np.ones(500), values, none, np.ones(500))
    often = Units(np.full(500, 1000.0), 1000 * values, none, np.ones(500))
    for a, b in zip(
        linear(once)[1].covariance.ravel(), linear(often)[1].covariance.ravel(), strict=True
    ):
        assert a == pytest.approx(b, rel=1e-9)
    assert linear(once)[0] == pytest.approx(linear(often)[0])


def test_units_that_moved_are_left_out() -> None:
    found = totals(0.0, 100)
    for metric in ("ttft", "error_rate", "prompt_tokens"):
        found.add("b", "u0", metric, 1.0)
    said = analyse(SPEC, found.of)
    assert said.moved == 1 and said.comparisons[0].control_units == 49


def test_units_count_by_the_shares_that_there_were_when_they_came() -> None:
    """1,000 by halves, then as many of which a tenth is for b, to which 100 of the first move."""
    found, dealt = totals(0.0, 1000), ({"a": 0.5, "b": 0.5}, {"a": 0.9, "b": 0.1})
    for unit in range(2000):
        variant = "ab"[unit % 2] if unit < 1000 else "ab"[unit % 10 == 0]
        found.dealt(variant, f"u{unit}", unit // 1000)
    for unit in range(0, 200, 2):
        found.dealt("b", f"u{unit}", 1)
    after = msgspec.structs.replace(SPEC, variants={"a": Variant(weight=90), "b": Variant(weight=10)})  # fmt: skip
    said = analyse(after, found.of, dealt)
    assert said.mismatch.counts == {"a": 1400, "b": 600} == said.mismatch.expected
    assert not said.mismatch.found and said.moved == 100
    for unit in range(2000, 2100):  # of whom all are of b
        found.dealt("b", f"u{unit}", 1)
    assert analyse(after, found.of, dealt).mismatch.found


def test_units_are_compared_with_those_that_came_under_the_same_shares() -> None:
    """The service is faster when b gets as many units as a than when it had a tenth of them."""
    rng, found, shares = np.random.default_rng(7), Totals(), [(0.1, 0.01), (0.1, 0.1), (0.5, 0.5)]
    dealt = [{"a": a, "b": b} for a, b in shares]
    spec = msgspec.structs.replace(SPEC, metrics=("ttft",), cuped=())
    for unit in range(4000):
        stage = 2 * (unit // 2000)
        variant = "b" if rng.random() < (0.09, 0, 0.5)[stage] else "a"
        ttft = (1.0, 0, 0.8)[stage] * rng.lognormal(0, 0.4)
        found.observe(spec, variant, f"u{unit}", RequestEvent("", 0, ttft=ttft))
        found.dealt(variant, f"u{unit}", stage)
    (same,) = analyse(spec, found.of, dealt).comparisons
    assert not same.decided and same.units + same.control_units == 4000
    for (variant, _, name), total in found.of.items():
        total.total += 0.2 if (variant, name) == ("b", "ttft") else 0.0
    (slower,) = analyse(spec, found.of, dealt).comparisons
    assert slower.decided and slower.low < 0.2 < slower.high
    assert slower.value - slower.control == pytest.approx(slower.difference)


@pytest.mark.parametrize(
    ("dealt", "stages"),
    [
        ([(50, 50)], [0]),
        ([(90, 10), (50, 50)], [1]),  # of a those that came again have moved
        ([(50, 10), (50, 50)], [0]),  # old units are new to b
        ([(5, 5), (20, 20), (50, 50)], [0, 1, 2]),
        ([(50, 10), (20, 10), (20, 50)], [1]),
        ([(10, 1), (10, 10), (50, 50)], [0, 2]),
    ],
)
def test_which_units_are_compared(dealt: list[tuple[int, int]], stages: list[int]) -> None:
    assert comparable([{"a": a / 100, "b": b / 100} for a, b in dealt]) == stages


def test_what_is_no_number_decides_nothing() -> None:
    first = analyse(SPEC, totals(0.05, 600).of).comparisons[0]
    assert first.decided
    assert not replace(first, low=math.nan, high=math.nan).decided


def test_intervals_are_narrowest_near_their_horizon() -> None:
    """Beside the standard error, which shrinks anyhow."""
    wide = [float(half_width(1 / n, n, 1000, 0.05) * math.sqrt(n)) for n in (10, 100, 1000, 10_000)]
    assert min(wide) == wide[2] and wide[2] < 3.1 < wide[0]


def test_plans() -> None:
    found = rate_plan(0.1, 0.1, per_day=5000)
    assert (found.units, found.fixed, found.days) == (56_498, 29_504, 56_498 / 5000)
    assert plan(1.0, 1.0, 0.1, explained=0.5).fixed == math.ceil(plan(1.0, 1.0, 0.1).fixed / 2)
    for rate, effect, wrong in ((1.0, 0.1, "1"), (0.9, 0.5, "1.35"), (0.1, -1, "0")):
        with pytest.raises(UsageError, match=f"between 0 and 1, not {wrong}"):
            rate_plan(rate, effect)
    with pytest.raises(UsageError, match="other than 0"):
        plan(1.0, 1.0, 0.0)
    for alpha, power in ((0, 0.8), (1, 0.8), (0.05, 0), (0.05, 1)):
        with pytest.raises(UsageError, match="alpha and power lie between 0 and 1"):
            rate_plan(0.1, 0.1, alpha=alpha, power=power)
    for sure in ({"alpha": 1e-17}, {"power": 1 - 1e-17}):
        with pytest.raises(UsageError):
            rate_plan(0.1, 0.1, **sure)
    for effect in (1e-300, -1e-160):
        with pytest.raises(UsageError, match="is too small to be found"):
            rate_plan(0.1, effect)


def test_a_plan_keeps_its_promise() -> None:
    """Four of five experiments of the planned size find the effect."""
    rng, wanted = np.random.default_rng(5), plan(1.0, 0.5, 0.1)
    half, found = wanted.units // 2, 0
    for _ in range(300):
        a, b = rng.normal(1.0, 0.5, half), rng.normal(1.1, 0.5, half)
        variance = (a.var() + b.var()) / half
        found += b.mean() - a.mean() > half_width(variance, 2 * half, wanted.units, 0.05)
    assert abs(found / 300 - 0.8) < 0.07


@pytest.mark.parametrize(("rate", "effect", "share"), [(0.1, 1.0, 0.5), (0.02, 0.5, 0.1)])
def test_a_plan_of_a_rate_keeps_its_promise(rate: float, effect: float, share: float) -> None:
    """Also where the rate that is looked for spreads more than that which is."""
    rng, wanted = np.random.default_rng(6), rate_plan(rate, effect, share=share)
    n, m = round(wanted.units * share), round(wanted.units * (1 - share))
    b, a = rng.binomial(n, rate * (1 + effect), 2000) / n, rng.binomial(m, rate, 2000) / m
    variance = b * (1 - b) / n + a * (1 - a) / m
    assert np.mean(b - a > half_width(variance, n + m, wanted.units, 0.05)) > 0.78


def test_the_page() -> None:
    whole = page(SPEC, (t := totals(0.05, 200)).of, analyse(SPEC, t.of)).decode()
    assert whole.count("<svg") == 2 and "ttft" in whole and "yes" in whole
    few = page(SPEC, (t := totals(0.0, 10)).of, analyse(SPEC, t.of)).decode()
    assert "Too few units" in few
    unsound = page(SPEC, (t := totals(0.0, 100, only="b")).of, analyse(SPEC, t.of)).decode()
    assert 'class="alarm"' in unsound and "<svg" not in unsound and "<td>" not in unsound


def test_pages_show_names_as_text() -> None:
    variants = {"a": Variant(weight=50), "<script>": Variant(weight=50)}
    spec = msgspec.structs.replace(SPEC, variants=variants)
    found = totals(0.0, 100)
    found.of = {("<script>" if v == "b" else v, u, n): t for (v, u, n), t in found.of.items()}
    assert b"<script>" not in page(spec, found.of, analyse(spec, found.of))


BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"temperature":1.0,"big":123456789012345678901}'


def test_bodies() -> None:
    assert altered(BODY, Variant(weight=50)) is BODY
    changed = altered(BODY, Variant(weight=50, model="n", set={"temperature": 0.3}))
    assert changed == BODY.replace(b'"m"', b'"n"').replace(b"1.0", b"0.3")
    brief = Variant(weight=50, prompt_prefix="Be brief. ")
    assert b'[{"role":"system","content":"Be brief. "},{"role":"user"' in altered(BODY, brief)
    system = BODY.replace(b'"user"', b'"system"')
    assert b'[{"role":"system","content":"Be brief. hi"}]' in altered(system, brief)
    assert altered(b'{"messages":5}', brief) == b'{"messages":5}'  # the server refuses it
    assert altered(b'{"prompt":"Once"}', brief) == b'{"prompt":"Be brief. Once"}'
    assert altered(b'{"input":"x"}', brief) == b'{"input":"x","instructions":"Be brief. "}'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"control": "c"}, "one of them its control"),
        ({"variants": {"a": {"weight": 50}}}, "two or more variants"),
        ({"variants": {"a": {"weight": 90}, "b": {"weight": 50}}}, "more than 1"),
        ({"variants": {"a": {"weight": 90}, "b": {"weight": 0}}}, "weight of 0.01 or more"),
        ({"variants": {"a": {"weight": 50}, "b": {"weight": 50, "set": {"messages": []}}}}, "cannot set 'messages'"),
        ({"metrics": []}, "different metrics"),
        ({"cuped": ["tokens"]}, "cuped knows"),
        ({"id": "a b"}, "the experiment:"),
    ],
)  # fmt: skip
def test_experiments_that_cannot_be(change: dict[str, object], message: str) -> None:
    given = {
        "id": "e",
        "model": "m",
        "control": "a",
        "variants": {"a": {"weight": 50}, "b": {"weight": 50}},
    }
    with pytest.raises(UsageError, match=re.escape(message)):
        convert(given | change)
