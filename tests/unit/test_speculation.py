"""When steps look for drafts, and what these bring and cost."""

from __future__ import annotations

import itertools

import pytest

from octavo.backends.base import Sample
from octavo.engine.blocks import BlockAllocator
from octavo.engine.cost import GRACE, CostModel
from octavo.engine.drafts import (
    BEGINS,
    LONGEST_MATCH,
    MAX_DRAFT,
    Lookup,
    Predicted,
    Proposal,
)
from octavo.engine.kv import KVCache
from octavo.engine.lookahead import TRIAL, TRIED, Lookahead
from octavo.engine.prefix import PrefixIndex
from octavo.engine.runner import Outcome
from octavo.engine.scheduler import NOTHING, Draft, ScheduledSpan
from octavo.engine.sequence import Sequence
from octavo.engine.speculation import LEEWAY, MOST_SKIPPED, SHARE, Speculation
from tests.unit.sequences import sequence


class Wrong:
    """Writes drafts that are never drawn, in a second a token."""

    name = "draft"

    def __init__(self) -> None:
        self.now, self.asked = 0.0, 0

    def serves(self, sequence: Sequence) -> bool:
        return True

    def lag(self, sequence: Sequence) -> int:
        return 0

    def propose(self, sequences: list[Sequence], depth: int) -> list[Proposal | None]:
        self.asked += 1
        self.now += 0.1 * depth
        return [Proposal(self.name, [7] * depth, 0, [0.9] * depth) for _ in sequences]

    def free(self, sequence: Sequence) -> None: ...

    def prepare(self, idle: bool) -> bool:
        return False


class Late(Wrong):
    """One that has a long prompt to compute first."""

    def lag(self, sequence: Sequence) -> int:
        return 400


def test_the_first_trial_is_at_once_and_later_ones_take_a_small_share_of_the_time() -> None:
    writer, asked = Late(), [sequence([1, 2], [3])]
    ahead = Lookahead(writer, lambda: writer.now)
    guessed = ahead.cost(asked, 0.01)
    assert ahead.trial(guessed) == ahead.trial(guessed) == TRIAL  # nothing was written yet
    assert ahead.write(asked, TRIAL)[1] == 0.4
    cost = ahead.cost(asked, 0.01)
    assert cost.once == pytest.approx(0.4) and guessed.once < cost.once
    assert ahead.trial(cost) == 0
    ahead.spent(0.99 * (cost.once + TRIAL * cost.each) / TRIED)
    assert ahead.trial(cost) == 0
    ahead.spent(0.02 * (cost.once + TRIAL * cost.each) / TRIED)
    assert ahead.trial(cost) == TRIAL
    assert ahead.trial(cost) == 0


def test_a_draft_model_that_does_not_pay_is_hardly_asked() -> None:
    """Of 800 requests of ten tokens, in steps of a second."""
    index = PrefixIndex(BlockAllocator(8))
    writer, policy = Wrong(), CostModel()
    speculation = Speculation(
        KVCache(index, lambda a, b: None), 32, policy, [], writer, clock=lambda: writer.now
    )
    drafting = 0.0
    for request in range(800):
        one = sequence([1, 2, 3], [4])
        for _ in range(10):
            span = ScheduledSpan(one, len(one.kv.tokens) - 1, 1, True, NOTHING, NOTHING)
            before = writer.now
            (span,) = speculation.draft([span])
            drafting += (writer.now - before) * (request > 100)
            seconds = 1.0 + 0.1 * len(span.draft.tokens)
            outcome = Outcome(span, [], [Sample(5, 0.0, [], [])], None)
            speculation.compare([outcome])
            writer.now += seconds
            speculation.took([outcome], writer.now - before, 1)
            one.append(5)
        index.free(one.kv.blocks)
    assert 0 < drafting < 0.01 * writer.now
    assert 20 < writer.asked < 200


class Numbers:
    """A grammar of tokens below 10."""

    complete = False

    def allowed(self, tokens: list[int]) -> int:
        return next((i for i, t in enumerate(tokens) if t >= 10), len(tokens))


@pytest.mark.parametrize("found, legal", [([5, 6, 70, 8], [5, 6]), ([70, 5], []), ([5], [5])])
def test_of_what_is_found_only_what_a_grammar_allows_is_proposed_and_judged(
    found: list[int], legal: list[int]
) -> None:
    class Found(Lookup):
        def propose(self, sequence: Sequence) -> Proposal | None:
            return Proposal("lookup", found, 4)

    policy = CostModel()
    policy.times.record(1, 1.0, 0.0)
    kv = KVCache(PrefixIndex(BlockAllocator(8)), lambda a, b: None)
    speculation = Speculation(kv, 32, policy, [Found()], clock=lambda: 0.0)
    one = sequence([1, 2, 3], [4])
    one.sampling.constraint = Numbers()  # type: ignore[assignment]
    span = ScheduledSpan(one, 3, 1, True, NOTHING, NOTHING)
    chances = speculation._propose(one)
    assert len(chances) == len(legal)
    speculation.compare([Outcome(span, [], [Sample(t, 0.0, [], []) for t in [*legal, 9]], None)])
    assert speculation._known.chance("lookup", 4, BEGINS) >= 0.55  # what it forbids is no mistake


@pytest.mark.parametrize("row", [0.03, 0.15, 0.5])
@pytest.mark.parametrize("steps", [40, 400])
def test_what_always_looks_likely_and_is_wrong_costs_next_to_nothing(
    row: float, steps: int
) -> None:
    """No more than LEEWAY of its time and GRACE of a step: the worst text for speculation."""

    class Certain(Lookup):
        def propose(self, sequence: Sequence) -> Proposal | None:
            return Proposal("lookup", [7] * MAX_DRAFT, LONGEST_MATCH)

    policy, kv = CostModel(), KVCache(PrefixIndex(BlockAllocator(8)), lambda a, b: None)
    times = {rows: (1 + row * rows) / (1 + row) for rows in range(1, MAX_DRAFT + 2)}
    for rows, seconds in times.items():
        policy.times.record(rows, seconds, 0.0)
    speculation = Speculation(kv, 32, policy, [Certain()], clock=lambda: 0.0)
    speculation._known.compare = lambda *_: None  # type: ignore[method-assign]  # nothing is learned
    one, drafted, lost = sequence([1, 2, 3], [4]), 0, 0.0
    for step in range(1, steps + 1):
        (span,) = speculation.draft([ScheduledSpan(one, 3, 1, True, NOTHING, NOTHING)])
        outcome = Outcome(span, [], [Sample(5, 0.0, [], [])], None)
        speculation.compare([outcome])
        speculation.took([outcome], times[1 + len(span.draft.tokens)], 1)
        drafted += len(span.draft.tokens)
        lost += times[1 + len(span.draft.tokens)] - 1
        assert lost <= LEEWAY * (step + lost) + GRACE + 1e-9
    assert drafted  # it was tried
    assert speculation.counts.lost == pytest.approx(lost)
    assert speculation.stats()["speculation_lost_us"] == int(1e6 * speculation.counts.lost)


class Waits(Lookup):
    """Finds nothing before so many calls."""

    def __init__(self, until: int = 10**6) -> None:
        self.until, self.asked = until, 0

    def propose(self, sequence: Sequence) -> Proposal | None:
        self.asked += 1
        found = self.asked > self.until
        return Proposal("lookup", [7] * MAX_DRAFT, LONGEST_MATCH) if found else None


def played(source: Waits, one: Sequence, calls: int) -> tuple[Speculation, list[int]]:
    """After calls of a second each, all of which draw what `source` proposes: what the source was
    asked by then, after each."""
    kv = KVCache(PrefixIndex(BlockAllocator(8)), lambda a, b: None)
    speculation, asked = Speculation(kv, 32, CostModel(), [source], clock=lambda: 0.0), []
    for _ in range(calls):
        (span,) = speculation.draft([ScheduledSpan(one, 3, 1, True, NOTHING, NOTHING)])
        drawn = [Sample(7, 0.0, [], []) for _ in range(1 + len(span.draft.tokens))]
        outcomes = [Outcome(span, [], drawn, None)]
        speculation.compare(outcomes)
        speculation.took(outcomes, 1.0, 1)
        asked.append(source.asked)
    return speculation, asked


def test_where_nothing_is_found_more_and_more_calls_are_skipped_and_their_time_counts() -> None:
    one, source = sequence([1, 2, 3], [4]), Waits()
    speculation, asked = played(source, one, 120)
    looks = [i for i in range(1, len(asked)) if asked[i] > asked[i - 1]]
    gaps = [b - a for a, b in itertools.pairwise([0, *looks])]
    skipped = [min(MOST_SKIPPED, (look + 1) // SHARE) for look in [0, *looks]]
    assert gaps == [1 + n for n in skipped[:-1]]
    assert gaps[: SHARE + 4] == [1] * (SHARE - 1) + [2] * 4 + [3]
    assert gaps[-4:] == [1 + MOST_SKIPPED] * 4
    assert looks[-1] == len(asked) - 1
    assert speculation._records[one].spent == len(asked)


def test_where_something_is_found_every_call_looks_again() -> None:
    source = Waits(until=2 * SHARE)
    asked = played(source, sequence([1, 2, 3], [4]), 8 * SHARE)[1]
    found = asked.index(2 * SHARE + 1)
    assert asked[found:] == list(range(asked[found], asked[found] + len(asked) - found))


def test_every_call_looks_where_a_grammar_may_force_something() -> None:
    one, source = sequence([1, 2, 3], [4]), Waits()
    one.sampling.constraint = Numbers()  # type: ignore[assignment]
    assert played(source, one, 8 * SHARE)[1][-1] == 8 * SHARE


def test_a_prompt_has_every_call_look_again() -> None:
    one, source = sequence([1, 2, 3], [4]), Waits()
    speculation, asked = played(source, one, 8 * SHARE)
    prompt = ScheduledSpan(sequence([1, 2, 3], []), 0, 2, False, NOTHING, NOTHING)
    assert speculation.draft([prompt]) == [prompt]
    for _ in range(SHARE):
        speculation.draft([ScheduledSpan(one, 3, 1, True, NOTHING, NOTHING)])
    assert source.asked == asked[-1] + SHARE


@pytest.mark.parametrize("forced", [0, 8])
def test_a_run_that_a_grammar_forced_adds_nothing_to_what_drafts_win_or_lose(forced: int) -> None:
    """It is computed with them and without, and a token that is accepted saves a step of one row."""
    kv = KVCache(PrefixIndex(BlockAllocator(8)), lambda a, b: None)
    speculation = Speculation(kv, 32, CostModel(), [Predicted()], clock=lambda: 0.0)
    speculation._policy.times.record(1, 0.004, 0.0)  # type: ignore[union-attr]
    speculation._policy.times.record(2, 0.005, 0.0)  # type: ignore[union-attr]
    one = sequence([1, 2, 3], [4], prediction=[4, 7])
    for drawn, balance in (([7, 5], 0.003), ([6], 0.002)):
        assert len(speculation._propose(one)) == 1
        span = ScheduledSpan(
            one, 3, 1 + forced, True, NOTHING, NOTHING, Draft([7], [], ["prediction"])
        )
        outcome = Outcome(span, [], [Sample(t, 0.0, [], []) for t in drawn], None)
        speculation.took([outcome], 0.005 + 0.001 * forced, 1)
        assert speculation._records[one].balance == pytest.approx(balance)


def test_what_a_prediction_brought_is_counted() -> None:
    kv = KVCache(PrefixIndex(BlockAllocator(8)), lambda a, b: None)
    speculation = Speculation(kv, 32, CostModel(), [Predicted()], clock=lambda: 0.0)
    one = sequence([1, 2, 3], [4], prediction=[4, 7, 8, 9])
    for drawn, counted in (([7, 8, 5], (2, 1)), ([6], (2, 4)), ([7, 8, 9, 6], (5, 4))):
        assert len(speculation._propose(one)) == 3
        draft = Draft([7, 8, 9], [], ["prediction"])
        span = ScheduledSpan(one, 3, 1, True, NOTHING, NOTHING, draft)
        speculation.compare([Outcome(span, [], [Sample(t, 0.0, [], []) for t in drawn], None)])
        assert one.predicted == counted
    stats = speculation.stats()
    assert (stats["accepted_prediction"], stats["drafted_prediction"]) == (5, 9)
