"""Where drafts come from, what they are worth, and how deep a step verifies them."""

from __future__ import annotations

import random

import pytest

from octavo.backends.base import Sample
from octavo.engine.bitmask import Mask, mask_of, words_for
from octavo.engine.blocks import BlockAllocator
from octavo.engine.cost import GRACE, LEAST_GAIN, MOST_ROW, ROW, Acceptance, CostModel, StepTimes
from octavo.engine.drafts import (
    BEGINS,
    GOES_ON,
    INDEXED,
    LONGEST_MATCH,
    MAX_DRAFT,
    RECENT_SALTS,
    RECENT_TOKENS,
    START,
    Lookup,
    NgramIndex,
    Predicted,
    Proposal,
    Recent,
)
from octavo.engine.kv import KVCache, KVState
from octavo.engine.lookahead import TRIAL, TRIED, Lookahead
from octavo.engine.prefix import PrefixIndex
from octavo.engine.request import Request, SamplingParams
from octavo.engine.runner import Outcome
from octavo.engine.sampling_state import SamplingState
from octavo.engine.scheduler import NOTHING, Draft, ScheduledSpan
from octavo.engine.sequence import Sequence
from octavo.engine.speculation import LEEWAY, Speculation


def sequence(prompt: list[int], reply: list[int], salt: str = "", **fields: object) -> Sequence:
    request = Request(id="a", prompt=prompt, params=SamplingParams(), salt=salt, **fields)  # type: ignore[arg-type]
    kv = KVState(list(prompt), salt)
    made = Sequence.of(
        request, 0, 0.0, 4096, kv, SamplingState(request.params, kv.tokens, len(prompt), 99), -1
    )
    for token in reply:
        made.append(token)
    return made


def longest(tokens: list[int]) -> int:
    """Length of the longest match of the end of `tokens` that occurs before, by trying all."""
    most = 0
    for place in range(2, len(tokens)):
        length = 0
        while (
            length < min(place, LONGEST_MATCH) and tokens[place - 1 - length] == tokens[-1 - length]
        ):
            length += 1
        most = max(most, length)
    return most if most >= 2 else 0


def test_the_index_finds_an_occurrence_as_it_grows() -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(4) for _ in range(2)]
    index = NgramIndex(tokens)
    exact = 0
    for _ in range(400):
        tokens.append(rng.randrange(9))
        place, length = index.find(tokens)
        assert tokens[place - length : place] == tokens[len(tokens) - length :]
        assert place < len(tokens) and length <= longest(tokens)
        assert (length >= 2) == (longest(tokens) >= 2)
        exact += length == longest(tokens)
    assert exact > 380  # of a chain, only the newest few are looked at


def test_only_the_last_tokens_are_searched() -> None:
    tokens = [1, 2, 3, 4, 5, 1, 2]
    assert NgramIndex(tokens).find(tokens) == (2, 2)
    assert NgramIndex(tokens, 1).find(tokens) == (0, 0)


def test_a_loop_goes_on() -> None:
    found = Lookup().propose(sequence([9, 1, 2, 3], [1, 2]))
    assert found == Proposal("lookup", ([3, 1, 2] * MAX_DRAFT)[:MAX_DRAFT], 2)
    assert Lookup().propose(sequence([9, 1, 2, 3], [1, 4])) is None
    assert Lookup().propose(sequence([9], [])) is None


def test_a_prediction_is_followed_from_its_start_and_found_again() -> None:
    prediction = list(range(20, 60))
    source = Predicted()

    def propose(reply: list[int]) -> Proposal | None:
        return source.propose(sequence([1, 2], reply, prediction=prediction))

    assert propose([]) == Proposal("prediction", prediction[:MAX_DRAFT], START)
    assert propose([20, 21]) == Proposal("prediction", prediction[2 : 2 + MAX_DRAFT], START)
    assert propose([20, 7]) is None
    assert propose([20, 7, 30, 31]) == Proposal("prediction", prediction[12 : 12 + MAX_DRAFT], 2)
    assert propose([58, 59]) is None  # its end
    assert source.propose(sequence([1, 2], [20])) is None


def test_of_a_prediction_the_first_tokens_are_searched() -> None:
    prediction, source = list(range(INDEXED + 9)), Predicted()
    early = sequence([1, 2], prediction[INDEXED - 3 : INDEXED - 1], prediction=prediction)
    late = sequence([1, 2], prediction[-3:-1], prediction=prediction)
    assert source.propose(early) == Proposal("prediction", prediction[INDEXED - 1 :], 2)
    assert source.propose(late) is None
    assert [len(index.tokens) for index in source._indexes.values()] == [INDEXED, INDEXED]


def test_recent_replies_are_of_the_same_salt_and_bounded() -> None:
    source = Recent()
    source.finish(sequence([1, 2], [5, 6, 7, 8], "a"))
    asked = sequence([3, 4], [5, 6], "a")
    assert source.propose(asked) == Proposal("recent", [7, 8], 2)
    assert source.propose(sequence([3, 4], [5, 6], "b")) is None
    assert source.propose(sequence([3, 4], [1, 2], "a")) is None  # a prompt is nobody's reply
    rng = random.Random(0)
    for i in range(3 * RECENT_SALTS):
        source.finish(sequence([1], [rng.randrange(90) for _ in range(9)], f"s{i}"))
    assert len(source._by_salt) == RECENT_SALTS
    for _ in range(5):
        source.finish(sequence([1], [rng.randrange(90) for _ in range(RECENT_TOKENS // 3)], "c"))
        assert 0 < len(source._by_salt["c"].tokens) <= source.size <= RECENT_TOKENS
    for i in range(9):
        source.finish(
            sequence([1], [rng.randrange(90) for _ in range(RECENT_TOKENS // 4)], f"t{i}")
        )
        assert source.size <= RECENT_TOKENS
    assert list(source._by_salt) == ["t5", "t6", "t7", "t8"]
    for _ in range(5):
        source.finish(sequence([1], [rng.randrange(90) for _ in range(RECENT_TOKENS // 3)], "c"))
    reply = source._by_salt["c"].tokens[-40:]
    found = source.propose(sequence([1], reply[:20], "c"))
    assert found is not None and found.tokens == reply[20 : 20 + MAX_DRAFT]


def test_what_is_kept_of_a_sequence_goes_with_it() -> None:
    lookup = Lookup()
    one = sequence([9, 1, 2, 3], [1, 2])
    assert lookup.propose(one) and len(lookup._indexes) == 1
    del one
    assert len(lookup._indexes) == 0


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
        got = made.ahead(likely, free, count, 12, 0.0, lambda k: once + k * each)  # noqa: B023
        best = max(range(12 // count + 1), key=rate)
        assert got == (best if rate(best) > LEAST_GAIN * rate(0) else 0)


def test_a_draft_model_is_not_asked_where_what_is_found_is_better() -> None:
    made = model({n: 1.0 + 0.1 * n for n in range(1, 20)})
    found = [[0.99**k for k in range(1, 16)]]
    assert made.ahead([0.6], [[]], 1, 15, 0.0, lambda k: 0.05 * k) > 0
    assert made.ahead([0.6], found, 1, 15, 0.0, lambda k: 0.05 * k) == 0
    assert CostModel().ahead([0.6], [[]], 1, 15, 0.0, lambda k: 0.0) == 0  # nothing was measured


def test_chances_of_what_a_draft_model_writes_follow_its_own_probabilities() -> None:
    known = Acceptance()
    sure, unsure = (Proposal("draft", [1, 2], 0, [p, p]) for p in (0.97, 0.12))
    assert known.chances(sure)[0] == pytest.approx(0.95) and known.chances(unsure)[0] < 0.2
    for _ in range(300):
        known.compare(sure, [9])
        known.compare(unsure, [1, 2])
    assert known.chances(sure)[:1] < known.chances(unsure)[:1]
    assert known.any("draft") == pytest.approx(2 / 3, abs=0.02) and known.any("self") == 0.7


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


def test_a_step_that_was_held_up_is_tried_again() -> None:
    policy = CostModel()
    policy.times.record(1, 1.0, 0.0)
    policy.times.record(2, 9.0, 0.0)  # of which a step twice as long is believed
    assert policy.affordable([0.9], 1, 0.0, 0.0) == []
    policy.times.record(1, 1.0, 20.0)
    assert policy.affordable([0.9], 1, 20.0, 0.0) == [0.9]
    assert policy.depths([[0.9]], 1, 1, 20.0) == [1]


def test_what_a_grammar_forces_is_verified_whatever_it_costs() -> None:
    policy = CostModel()
    assert policy.affordable([0.9], 1, 0.0, 0.0) == [0.9]  # no step was measured yet
    policy.times.record(1, 1.0, 0.0)
    assert policy.affordable([1.0, 1.0, 0.9], 1, 0.0, -5.0) == [1.0, 1.0]
    assert policy.affordable([0.9, 0.8], 1, 0.0, -5.0) == []
    assert policy.affordable([0.9] * 9, 1, 0.0, 0.0) == [0.9] * 3  # of 0.2 / 1.2 each
    assert policy.affordable([0.9] * 9, 3, 0.0, 0.0) == [0.9]  # beside two others
    assert policy.affordable([0.9] * 9, 1, 0.0, 0.51) == [0.9] * 6


class Alternating:
    """A grammar of zeros and ones; after a 1 comes a 0."""

    complete = finished = False

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def fork(self) -> Alternating:
        return Alternating(self.last)

    def allows(self, token: int) -> bool:
        return token == 0 or (token == 1 and self.last == 0)

    def push(self, token: int) -> None:
        self.last = token

    def mask(self) -> Mask:
        return mask_of([0] if self.last else [0, 1], words_for(99))

    def narrow(self, mask: Mask) -> Mask:
        return mask


def test_a_draft_ends_before_what_needs_no_step() -> None:
    def rows(draft: list[int], logprobs: int | None) -> int:
        params = SamplingParams(grammar="", logprobs=logprobs)
        state = SamplingState(params, [5], 1, 99, constraint=Alternating())  # type: ignore[arg-type]
        return len(state.rows_after(draft))

    assert rows([0, 0, 1, 0, 0], None) == 2  # the 1 is drawn after them, the 0 after it is forced
    assert rows([1, 0, 0], None) == 0
    assert rows([0, 0, 1, 0, 0], 0) == 5  # a step for each whose log-probability is wanted
    assert rows([0, 7, 0], 0) == 1


def test_masks_after_a_draft_are_not_found_again() -> None:
    found: list[int] = []

    class Counted(Alternating):
        def fork(self) -> Counted:
            return Counted(self.last)

        def mask(self) -> Mask:
            found.append(self.last)
            return super().mask()

    params = SamplingParams(grammar="")
    state = SamplingState(params, [5], 1, 99, constraint=Counted())  # type: ignore[arg-type]
    other = SamplingState(params, [5], 1, 99, constraint=Alternating())  # type: ignore[arg-type]
    assert len(state.rows_after([0, 0, 0])) == 3 and len(found) == 3
    for token, masks in ((0, 3), (0, 3), (1, 4), (0, 5), (0, 6)):  # the third is not the draft's
        for each in (state, other):
            each.tokens.append(token)
            each.push(token)
        assert bytes(state.mask()) == bytes(other.mask())  # type: ignore[arg-type]
        assert len(found) == masks
