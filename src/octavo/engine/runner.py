"""The scheduler's work as the arrays a backend takes, and what comes back by piece of work."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import numpy as np

from octavo.backends.base import Executable, Ints, Sample, SamplingRow, StepInput
from octavo.engine.scheduler import Work


class Outcome(NamedTuple):
    """What a piece of work gave: log-probabilities of prompt tokens, and the next token."""

    work: Work
    scores: list[Sample]
    sample: Sample | None


def step_input(work: list[Work]) -> StepInput:
    """Rows of all sequences one after the other, and those of them that need logits."""
    ids: list[int] = []
    positions: list[int] = []
    spans: list[tuple[int, int, int, int]] = []
    tables: list[int] = []
    select: list[int] = []
    sampling: list[SamplingRow] = []
    for piece in work:
        sequence, count = piece
        start = sequence.computed
        spans.append((len(ids), count, start, len(tables)))
        for at in piece.scores:
            select.append(len(ids) + at - 1 - start)
            sampling.append(sequence.scoring(at))
        ids += sequence.tokens[start : start + count]
        positions += range(start, start + count)
        tables += sequence.blocks
        if piece.samples:
            select.append(len(ids) - 1)
            sampling.append(sequence.sampling())

    def array(values: object) -> Ints:
        return np.array(values, np.int32)

    return StepInput(
        array(ids), array(positions), array(spans), array(tables), array(select), sampling
    )


def run(executable: Executable, work: list[Work]) -> list[Outcome]:
    """Runs a step and gives every piece of work what is its own."""
    samples = iter(executable.step(step_input(work)))
    return [
        Outcome(w, list(islice(samples, len(w.scores))), next(samples) if w.samples else None)
        for w in work
    ]
