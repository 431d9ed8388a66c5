"""When a draft model is asked, and for how many tokens: where that is likely to bring more than it
costs.

What it writes is learned from wherever it is asked; where it does not seem to pay it is asked all
the same for a small share of the time, because texts change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

from octavo.engine.cost import StepTimes
from octavo.engine.drafts import Proposal
from octavo.engine.sequence import Sequence
from octavo.errors import place

LOG = logging.getLogger(__name__)
GUESS = 0.2  # of the target's time that a step takes, before it is measured
BATCHED = 0.1  # of a step's time that a token more takes where many are computed together, likewise
SPREAD = 16  # steps over which the time to catch up with a sequence is counted
TRIAL = 4  # tokens that are written at most to see whether it pays
TRIED = 0.005  # of the time that may be lost by that
NEWEST = 0.2  # weight of the latest time of a token to catch up


class DraftWriter(Protocol):
    """Computes drafts: a model of its own, or part of the target."""

    name: str

    def serves(self, sequence: Sequence) -> bool:
        """True if it can write what follows."""
        ...

    def lag(self, sequence: Sequence) -> int:
        """Tokens to compute before it can."""
        ...

    def propose(self, sequences: list[Sequence], depth: int) -> list[Proposal | None]:
        """Up to `depth` tokens after each; None for those it has to catch up with first."""
        ...

    def free(self, sequence: Sequence) -> None:
        """A sequence ends or is preempted."""
        ...

    def prepare(self, idle: bool) -> bool:
        """Does work left over from loading. Returns True if more remains."""
        ...


class DraftCost(NamedTuple):
    """Seconds to catch up, and for each token after that."""

    once: float
    each: float

    def of(self, depth: int) -> float:
        """Seconds that so many tokens count for."""
        return self.once / SPREAD + depth * self.each


class Lookahead:
    """Has drafts written, and measures what that takes."""

    def __init__(self, writer: DraftWriter, clock: Callable[[], float]) -> None:
        self.writer = writer
        self._clock = clock
        self._times = StepTimes()  # of a step by its sequences
        self._each: float | None = None  # seconds a token of a text to catch up with
        self._spent = 0.0  # seconds in steps
        self._tried = 0.0  # of those, to see whether it pays
        self._asked = False  # whether drafts were written; until then costs are guesses

    def cost(self, sequences: list[Sequence], plain: float) -> DraftCost:
        """What it takes to write after each sequence. plain: seconds of a step of the target."""
        each = self._times.plain(len(sequences)) or GUESS * plain
        late = sum(map(self.writer.lag, sequences))
        return DraftCost(late * (BATCHED * each if self._each is None else self._each), each)

    def trial(self, cost: DraftCost, most: int) -> int:
        """How many tokens, `most` at most, to write though it does not seem to pay."""
        depth = min(TRIAL, most)
        if not self._asked:
            return depth
        seconds = cost.once + depth * cost.each
        if self._tried + seconds > TRIED * self._spent:
            return 0
        self._tried += seconds
        return depth

    def spent(self, seconds: float) -> None:
        """Takes the time of a step of the target."""
        self._spent += seconds

    def write(
        self, sequences: list[Sequence], depth: int, plain: float
    ) -> tuple[list[Proposal | None], float]:
        """Drafts of `depth` tokens, and the seconds they took. One that fails is none.

        plain: seconds of a step of the target. Where the first token took longer than that, it was
        held up by something else, which must not say for long that drafts do not pay.
        """
        late, began = sum(map(self.writer.lag, sequences)), self._clock()
        self._asked = True
        try:
            out = self.writer.propose(sequences, depth)
        except Exception as e:
            LOG.error("no drafts could be written: %s", place(e))
            for sequence in sequences:
                self.writer.free(sequence)
            return [None] * len(sequences), self._clock() - began
        now = self._clock()
        seconds = now - began
        known = self._times.plain(len(sequences))
        if late <= len(sequences):
            each = seconds / depth
            self._times.record(len(sequences), min(each, plain) if known is None else each, now)
        else:
            token = max(0.0, seconds - depth * (known or 0.0)) / late
            self._each = (
                min(token, plain) if self._each is None
                else (1 - NEWEST) * self._each + NEWEST * token
            )  # fmt: skip
        return out, seconds
