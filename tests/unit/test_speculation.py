"""When steps look for drafts, and what these bring and cost."""

from __future__ import annotations

import math
from itertools import count

import pytest

from octavo.backends.base import Sample
from octavo.engine import pause
from octavo.engine.blocks import BlockAllocator
from octavo.engine.cost import GRACE, CostModel
from octavo.engine.drafts import (
    BEGINS,
    FORCED,
    LONGEST_MATCH,
    MAX_DRAFT,
    Lookup,
    Predicted,
    Proposal,
)
from octavo.engine.kv import KVCache
from octavo.engine.lookahead import TRIAL, TRIED, Lookahead
from octavo.engine.pause import LONGEST, STRETCH
from octavo.engine.prefix import PrefixIndex
from octavo.engine.runner import Outcome
from octavo.engine.scheduler import NOTHING, Draft, ScheduledSpan
from octavo.engine.sequence import Sequence
from octavo.engine.speculation import LEEWAY, DraftedStep, Speculation
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
    assert ahead.trial(guessed, 9) == ahead.trial(guessed, 9) == TRIAL  # nothing was written yet
    assert ahead.trial(guessed, 2) == 2
    assert ahead.write(asked, TRIAL, 0.01)[1] == 0.4
    cost = ahead.cost(asked, 0.01)
    assert cost.once == pytest.approx(0.4) and guessed.once < cost.once
    assert ahead.trial(cost, 9) == 0
    ahead.spent(0.99 * (cost.once + TRIAL * cost.each) / TRIED)
    assert ahead.trial(cost, 9) == 0
    ahead.spent(0.02 * (cost.once + TRIAL * cost.each) / TRIED)
    assert ahead.trial(cost, 9) == TRIAL
    assert ahead.trial(cost, 9) == 0


@pytest.mark.parametrize("writer", [Wrong(), Late()])
def test_a_draft_that_was_held_up_once_is_tried_again_soon(writer: Wrong) -> None:
    asked = [sequence([1, 2], [3])]
    ahead = Lookahead(writer, lambda: writer.now)
    writer.now, before = 0.0, ahead.cost(asked, 0.0001)
    ahead.write(asked, TRIAL, 0.0001)  # takes 0.1 s a token
    held_up = ahead.cost(asked, 0.0001)
    assert before.each <= held_up.each <= 0.0001 and held_up.once <= writer.lag(asked[0]) * 0.0001


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
            step = speculation.draft([span])
            (span,) = step.spans
            drafting += (writer.now - before) * (request > 100)
            seconds = 1.0 + 0.1 * len(span.draft.tokens)
            outcome = Outcome(span, [], [Sample(5, 0.0, [], [])], None)
            speculation.compare(step, [outcome])
            writer.now += seconds
            speculation.took(step, [outcome], writer.now - before, 1)
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
    found = speculation._propose(one, 1, 0.0)
    assert len(found.chances) == len(legal)
    drawn = [Sample(t, 0.0, [], []) for t in [*legal, 9]]
    speculation.compare(DraftedStep([span], {one: found}), [Outcome(span, [], drawn, None)])
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
    for number in range(1, steps + 1):
        step = speculation.draft([ScheduledSpan(one, 3, 1, True, NOTHING, NOTHING)])
        (span,) = step.spans
        outcome = Outcome(span, [], [Sample(5, 0.0, [], [])], None)
        speculation.compare(step, [outcome])
        speculation.took(step, [outcome], times[1 + len(span.draft.tokens)], 1)
        drafted += len(span.draft.tokens)
        lost += times[1 + len(span.draft.tokens)] - 1
        assert lost <= LEEWAY * (number + lost) + GRACE + 1e-9
    assert drafted  # it was tried
    assert speculation.counts.lost == pytest.approx(lost)
    assert speculation.stats()["speculation_lost_us"] == int(1e6 * speculation.counts.lost)


@pytest.mark.parametrize("source, verified", [(FORCED, 5), ("lookup", 0)])
def test_what_a_grammar_forces_is_verified_whatever_it_costs(source: str, verified: int) -> None:
    class Found(Lookup):
        def propose(self, sequence: Sequence) -> Proposal | None:
            return Proposal(source, [7] * 5, LONGEST_MATCH)

    policy, kv = CostModel(), KVCache(PrefixIndex(BlockAllocator(8)), lambda a, b: None)
    policy.times.record(1, 1.0, 0.0)
    policy.times.record(2, 2.0, 0.0)  # more than a request may lose
    speculation = Speculation(kv, 32, policy, [Found()], clock=lambda: 0.0)
    assert speculation._propose(sequence([1, 2, 3], [4]), 1, 0.0).chances == [1.0] * verified


class Proposes(Lookup):
    """Proposes the same after every token: of one sequence only, or of all."""

    def __init__(self, match: int = LONGEST_MATCH, only: Sequence | None = None) -> None:
        self.match, self.only, self.asked = match, only, list[Sequence]()

    def propose(self, sequence: Sequence) -> Proposal | None:
        self.asked.append(sequence)
        if self.only not in (None, sequence):
            return None
        return Proposal("lookup", [7] * MAX_DRAFT, self.match)


class Nothing(Proposes):
    """Never finds anything."""

    def propose(self, sequence: Sequence) -> Proposal | None:
        super().propose(sequence)
        return None


class Played:
    """An engine's part: calls of a second for each of some sequences that decode."""

    def __init__(self, source: Proposes, writer: Wrong | None = None) -> None:
        self.source, self.writer = source, writer
        self.kv = KVCache(PrefixIndex(BlockAllocator(99)), lambda a, b: None)
        self.speculation = Speculation(self.kv, 32, CostModel(), [source], writer, clock=self.now)

    def now(self) -> float:
        return self.writer.now if self.writer is not None else 0.0

    def call(
        self, *sequences: Sequence, right: bool = False, steps: int = 1, start: int = 4
    ) -> list[int]:
        """Draft tokens of each, after drawing what was proposed, or not."""
        spans = [ScheduledSpan(s, start, 1, True, NOTHING, NOTHING) for s in sequences]
        before = self.now()
        step = self.speculation.draft(spans)
        outcomes = []
        for span in step.spans:
            count = 1 + len(span.draft.tokens) if right else steps
            drawn = [Sample(7 if right else 5, 0.0, [], []) for _ in range(count)]
            outcomes.append(Outcome(span, [], drawn, None))
        self.speculation.compare(step, outcomes)
        self.speculation.took(step, outcomes, len(spans) + self.now() - before, steps)
        return [len(s.draft.tokens) for s in step.spans]

    def looks(self, *sequences: Sequence, calls: int = 1, steps: int = 1) -> list[list[bool]]:
        """Whether each of some calls asked the source, for each of the sequences."""
        out = []
        for _ in range(calls):
            self.source.asked.clear()
            self.call(*sequences, steps=steps)
            out.append([s in self.source.asked for s in sequences])
        return [list(each) for each in zip(*out, strict=True)]

    def paused(self, one: Sequence) -> bool:
        return not self.speculation._records[one].pause.over(self.speculation._steps)


def decoding() -> Sequence:
    return sequence([1, 2, 3], [4, 4])


def begun(played: Played) -> Sequence:
    """A sequence for which calls look seldom by now."""
    one = decoding()
    (found,) = played.looks(one, calls=120)
    assert found[-9:].count(True) == 1
    while not played.paused(one):
        played.call(one)
    return one


def as_text(looks: list[bool]) -> str:
    return "".join("x" if looked else "." for looked in looks)


def test_where_nothing_is_found_calls_stop_looking_for_a_quarter_as_many_steps() -> None:
    (looks,) = Played(Nothing()).looks(decoding(), calls=200)
    found = as_text(looks)
    assert found.startswith("xxxxx.x.xx..x...x...x...x...x...x...x........x........x")
    assert set(found[100:].split("x")[1:-1]) == {"." * LONGEST}


@pytest.mark.parametrize("steps", [1, 2, 4, 8, 9, 20])
def test_steps_are_counted_however_many_a_call_computes(steps: int) -> None:
    (found,) = Played(Nothing()).looks(decoding(), calls=300, steps=steps)
    assert found[-100:].count(True) == pytest.approx(min(1, steps / (1 + LONGEST)) * 100, abs=1)


def test_looking_is_time_that_is_lost() -> None:
    played, one = Played(Nothing()), decoding()
    played.speculation._clock = count(0.0).__next__  # a second passes whenever it is asked
    for looked in (*[True] * (STRETCH + 1), False):
        before = played.speculation.counts.lost
        assert played.looks(one) == [[looked]]
        assert played.speculation.counts.lost - before == (2 if looked else 0)


def test_without_a_policy_no_time_is_lost() -> None:
    kv = KVCache(PrefixIndex(BlockAllocator(8)), lambda a, b: None)
    speculation = Speculation(kv, 32, None, [Proposes()], clock=count(0.0).__next__)
    span = ScheduledSpan(decoding(), 4, 1, True, NOTHING, NOTHING)
    step = speculation.draft([span])
    assert step == DraftedStep([span])
    speculation.compare(step, [Outcome(span, [], [Sample(5, 0.0, [], [])], None)])
    assert speculation.counts.lost == 0


def test_a_draft_that_is_verified_has_every_call_look_at_its_sequence() -> None:
    played, one, other = Played(Proposes()), decoding(), decoding()
    played.source.only = one
    while not any(played.call(one, other, right=True)):
        pass
    for _ in range(99):
        played.source.asked.clear()
        assert played.call(one, other, right=True)[0] > 0
        assert one in played.source.asked
    assert played.paused(other)
    played.source.only = sequence([], [])
    assert all(played.looks(one, calls=STRETCH)[0])


@pytest.mark.parametrize("streams", [1, 3, 4, 8, 9])
def test_pauses_grow_as_the_root_of_the_streams(streams: int) -> None:
    found = Played(Nothing()).looks(*(decoding() for _ in range(streams)), calls=400)
    times = math.isqrt(streams)
    assert {as_text(looks[300:]) for looks in found} == {as_text(found[0][300:])}
    assert f"x{'.' * LONGEST * times}x" in as_text(found[0][300:])


def test_sequences_that_came_at_different_times_are_looked_at_together() -> None:
    played, running = Played(Nothing()), list[Sequence]()
    for _ in range(5):
        running.append(decoding())
        played.looks(*running, calls=7)
    found = played.looks(*running, calls=200)
    assert len({as_text(looks[80:]) for looks in found}) == 1


def test_each_sequence_is_looked_at_by_itself() -> None:
    played = Played(Nothing())
    one, other = begun(played), decoding()
    first, second = played.looks(one, other, calls=STRETCH + 1)
    assert all(second) and first.count(True) <= 1


def test_beside_a_prompt_nothing_is_looked_for() -> None:
    played, one = Played(Proposes()), decoding()
    prompt = ScheduledSpan(sequence([1, 2, 3], []), 0, 2, False, NOTHING, NOTHING)
    spans = [ScheduledSpan(one, 4, 1, True, NOTHING, NOTHING), prompt]
    assert played.speculation.draft(spans).spans == spans and not played.source.asked


def test_every_call_looks_while_a_grammar_may_force_something() -> None:
    played = Played(Nothing())
    one, other = begun(played), begun(played)
    other.sampling.constraint = Numbers()  # type: ignore[assignment]
    first, second = played.looks(one, other, calls=90)
    assert all(second) and first.count(True) == pytest.approx(10, abs=1)


def test_a_proposal_that_is_right_has_the_next_call_look() -> None:
    played, one = Played(Proposes(match=2)), decoding()
    for _ in range(4 * STRETCH):
        played.call(one)
    played.speculation._records[one].pause.end()
    for _ in range(3):  # too little to verify anything, after so many that were wrong
        played.source.asked.clear()
        assert played.call(one, right=True) == [0]
        assert played.source.asked == [one]


@pytest.mark.parametrize("match", [2, LONGEST_MATCH])
@pytest.mark.parametrize("wrong", [30, 100, 300])
def test_a_copy_after_wrong_proposals_is_found_nearly_as_soon_as_without_pauses(
    match: int, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for longest in (0, LONGEST):
        monkeypatch.setattr(pause, "LONGEST", longest)
        played, one = Played(Proposes(match)), decoding()
        for _ in range(wrong):
            played.call(one)
        found.append(next(i for i in range(1000) if played.call(one, right=True)[0]))
    assert found[1] <= 1.25 * found[0] + LONGEST


def test_what_may_be_lost_follows_the_time_since_a_sequence_came() -> None:
    played = Played(Nothing())
    first, second = decoding(), decoding()
    for _ in range(30):
        played.call(first)
    played.call(first, second, start=2)
    for _ in range(99):
        played.call(first, second, steps=4)
    records, share = played.speculation._records, played.speculation._share
    assert records[first].allowance(share) == pytest.approx(LEEWAY * 130)
    assert records[second].allowance(share) == pytest.approx(LEEWAY * 100)


def test_what_a_step_that_failed_proposed_is_not_judged_later() -> None:
    played, one = Played(Proposes()), decoding()
    played.speculation._policy.times.record(1, 1.0, 0.0)  # type: ignore[union-attr]
    span = ScheduledSpan(one, 4, 1, True, NOTHING, NOTHING)
    drafted = played.speculation.draft([span])
    played.speculation.drop(drafted.spans)
    known = played.speculation._known.chance("lookup", LONGEST_MATCH)
    played.speculation.compare(
        DraftedStep([span]), [Outcome(span, [], [Sample(5, 0.0, [], [])], None)]
    )
    assert played.speculation._known.chance("lookup", LONGEST_MATCH) == known
    assert not played.paused(one)


def test_what_a_draft_model_wrote_counts_once() -> None:
    writer = Wrong()
    played, one = Played(Nothing(), writer), decoding()
    while not writer.asked:
        played.call(one)
    lost = played.speculation.counts.lost
    balance = played.speculation._records[one].balance
    assert lost > 0 > balance
    while not played.paused(one):
        played.call(one)
        lost, balance = played.speculation.counts.lost, played.speculation._records[one].balance
    played.call(one)
    assert played.speculation._policy.times.plain(1) == pytest.approx(1)  # type: ignore[union-attr]
    assert played.speculation.counts.lost == lost
    assert played.speculation._records[one].balance == balance


@pytest.mark.parametrize("forced", [0, 8])
def test_a_run_that_a_grammar_forced_adds_nothing_to_what_drafts_win_or_lose(forced: int) -> None:
    """It is computed with them and without, and a token that is accepted saves a step of one row."""
    kv = KVCache(PrefixIndex(BlockAllocator(8)), lambda a, b: None)
    speculation = Speculation(kv, 32, CostModel(), [Predicted()], clock=lambda: 0.0)
    speculation._policy.times.record(1, 0.004, 0.0)  # type: ignore[union-attr]
    speculation._policy.times.record(2, 0.005, 0.0)  # type: ignore[union-attr]
    one = sequence([1, 2, 3], [4], prediction=[4, 7])
    for drawn, balance in (([7, 5], 0.003), ([6], 0.002)):
        assert len(speculation._propose(one, 1, 0.0).chances) == 1
        span = ScheduledSpan(
            one, 3, 1 + forced, True, NOTHING, NOTHING, Draft([7], [], ["prediction"])
        )
        outcome = Outcome(span, [], [Sample(t, 0.0, [], []) for t in drawn], None)
        speculation.took(DraftedStep([span]), [outcome], 0.005 + 0.001 * forced, 1)
        assert speculation._records[one].balance == pytest.approx(balance)


def test_what_a_prediction_brought_is_counted() -> None:
    kv = KVCache(PrefixIndex(BlockAllocator(8)), lambda a, b: None)
    speculation = Speculation(kv, 32, CostModel(), [Predicted()], clock=lambda: 0.0)
    one = sequence([1, 2, 3], [4], prediction=[4, 7, 8, 9])
    for drawn, counted in (([7, 8, 5], (2, 1)), ([6], (2, 4)), ([7, 8, 9, 6], (5, 4))):
        found = speculation._propose(one, 1, 0.0)
        assert len(found.chances) == 3
        draft = Draft([7, 8, 9], [], ["prediction"])
        span = ScheduledSpan(one, 3, 1, True, NOTHING, NOTHING, draft)
        outcome = Outcome(span, [], [Sample(t, 0.0, [], []) for t in drawn], None)
        speculation.compare(DraftedStep([span], {one: found}), [outcome])
        assert one.predicted == counted
    stats = speculation.stats()
    assert (stats["accepted_prediction"], stats["drafted_prediction"]) == (5, 9)
