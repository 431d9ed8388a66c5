"""Beam search as arithmetic: which continuations to keep, which texts end, when to stop.

The rules are those of transformers' `GenerationMixin._beam_search`, so that equal log-probabilities
give equal sequences and scores: of `width` beams the (1 + number of end tokens) * width best
continuations are looked at; those that end count only among the `width` best of them; a finished
text scores sum of log-probabilities / generated tokens ** length_penalty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.backends.base import Sample
from octavo.engine.events import Finish
from octavo.engine.request import BeamSearch
from octavo.engine.sequence import Sequence


class BeamToken(NamedTuple):
    """A token of a beam with its log-probability and its alternatives."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished text."""

    score: float
    choices: tuple[BeamToken, ...]
    finish: Finish


@dataclass(eq=False, slots=True)
class Beam:
    """A text in progress. score: sum of its log-probabilities. candidates: the likeliest next
    tokens, once they are sampled."""

    sequence: Sequence
    score: float = 0.0
    choices: tuple[BeamToken, ...] = ()
    candidates: Sample | None = None


class Continuation(NamedTuple):
    beam: Beam
    score: float
    choice: BeamToken


@dataclass(eq=False, slots=True)
class BeamGroup:
    """The beams of one request. limit: most tokens of a sequence. candidates: continuations
    considered in each step."""

    params: BeamSearch
    width: int
    limit: int
    candidates: int
    live: list[Beam] = field(default_factory=list)
    finished: list[Hypothesis] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        """True if the candidates of every beam are known."""
        return all(b.candidates is not None for b in self.live)

    def add_candidates(self, sequence: Sequence, sample: Sample) -> None:
        """Takes the likeliest continuations of one beam.

        After a preemption a beam is sampled again. If the search has gone on by then, this is a
        duplicate of what it had before; it is ignored.
        """
        for beam in self.live:
            if beam.sequence is sequence and not sequence.kv.pending:
                beam.candidates = sample

    def select(self) -> list[Continuation]:
        """The beams of the next step, best first; empty once the search is over.

        Raises ValueError if a grammar becomes too costly.
        """
        following: list[Continuation] = []
        for place, c in enumerate(self._best()):
            finish = self._finish(c)
            if finish is None:
                following.append(c)
            elif place < self.width:
                length = len(c.beam.choices) + 1
                score = c.score / length**self.params.length_penalty
                self.finished.append(Hypothesis(score, (*c.beam.choices, c.choice), finish))
        following = following[: self.width]
        self.finished.sort(key=lambda h: -h.score)
        del self.finished[self.width :]
        return [] if self._over(following) else following

    def _best(self) -> list[Continuation]:
        """Continuations of all beams, best first; ties go to the earlier beam, then token."""
        every = []
        for beam in self.live:
            assert beam.candidates is not None
            top = beam.candidates.alternatives
            for token, logprob in top:
                every.append(
                    Continuation(beam, beam.score + logprob, BeamToken(token, logprob, top))
                )
        every.sort(key=lambda c: -c.score)
        return every[: self.candidates]

    def _finish(self, c: Continuation) -> Finish | None:
        sequence = c.beam.sequence
        if c.choice.token in sequence.sampling.stop_tokens:
            return "stop"
        constraint = sequence.sampling.constraint
        if constraint is not None:
            after = constraint.fork()
            after.push(c.choice.token)
            if after.finished:
                return "complete"
        return "length" if len(sequence.kv.tokens) + 1 >= self.limit else None

    def _over(self, following: list[Continuation]) -> bool:
        if not following:
            return True
        if len(self.finished) < self.width:
            return False
        if self.params.early_stopping is True:
            return True
        length = len(following[0].beam.choices) + 1
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            start = len(following[0].beam.sequence.kv.tokens) + 1 - length
            length = self.limit - start
        best = following[0].score / length**self.params.length_penalty
        return bool(best <= self.finished[-1].score)
