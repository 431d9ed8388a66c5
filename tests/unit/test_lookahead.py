"""When a draft model is asked though it does not seem to pay."""

from __future__ import annotations

from octavo.engine.drafts import Proposal
from octavo.engine.lookahead import TRIAL, TRIED, DraftCost, Lookahead
from octavo.engine.sequence import Sequence


class Writer:
    """One that would have to compute a long prompt first."""

    name = "draft"

    def serves(self, sequence: Sequence) -> bool:
        return True

    def lag(self, sequence: Sequence) -> int:
        return 400

    def propose(self, sequences: list[Sequence], depth: int) -> list[Proposal | None]:
        return [None] * len(sequences)

    def free(self, sequence: Sequence) -> None: ...

    def prepare(self, idle: bool) -> bool:
        return False


def test_the_first_trial_is_at_once_and_later_ones_take_a_small_share_of_the_time() -> None:
    ahead, cost = Lookahead(Writer(), lambda: 0.0), DraftCost(once=0.2, each=0.01)
    assert ahead.trial(cost) == TRIAL
    assert ahead.trial(cost) == 0
    two = 2 * (cost.once + TRIAL * cost.each)
    ahead.spent(0.99 * two / TRIED)
    assert ahead.trial(cost) == 0
    ahead.spent(0.02 * two / TRIED)
    assert ahead.trial(cost) == TRIAL
    assert ahead.trial(cost) == 0
