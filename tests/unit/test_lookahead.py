"""When a draft model is asked though it does not seem to pay."""

from __future__ import annotations

import pytest

from octavo.engine.drafts import Proposal
from octavo.engine.lookahead import TRIAL, TRIED, Lookahead
from octavo.engine.sequence import Sequence
from tests.unit.test_drafts import sequence as of


class Writer:
    """One that has to compute a long prompt first, a millisecond a token."""

    def __init__(self) -> None:
        self.now = 0.0

    name = "draft"

    def serves(self, sequence: Sequence) -> bool:
        return True

    def lag(self, sequence: Sequence) -> int:
        return 400

    def propose(self, sequences: list[Sequence], depth: int) -> list[Proposal | None]:
        self.now += 0.4
        return [None] * len(sequences)

    def free(self, sequence: Sequence) -> None: ...

    def prepare(self, idle: bool) -> bool:
        return False


def test_the_first_trial_is_at_once_and_later_ones_take_a_small_share_of_the_time() -> None:
    writer, asked = Writer(), [of([1, 2], [3])]
    ahead = Lookahead(writer, lambda: writer.now)
    guessed = ahead.cost(asked, 0.01)
    assert ahead.trial(guessed) == ahead.trial(guessed) == TRIAL  # nothing was written yet
    assert ahead.write(asked, TRIAL) == ([None], 0.4)
    cost = ahead.cost(asked, 0.01)
    assert cost.once == pytest.approx(0.4) and guessed.once < cost.once
    assert ahead.trial(cost) == 0
    ahead.spent(0.99 * (cost.once + TRIAL * cost.each) / TRIED)
    assert ahead.trial(cost) == 0
    ahead.spent(0.02 * (cost.once + TRIAL * cost.each) / TRIED)
    assert ahead.trial(cost) == TRIAL
    assert ahead.trial(cost) == 0
