"""Where drafts come from."""

from __future__ import annotations

import random

from octavo.engine.bitmask import Mask, mask_of, words_for
from octavo.engine.drafts import (
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
from octavo.engine.request import SamplingParams
from octavo.engine.sampling_state import SamplingState
from tests.unit.sequences import sequence


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
