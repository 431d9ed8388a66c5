"""The scheduler's work as the arrays a backend takes, and what comes back by piece of work."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import numpy as np

from octavo.backends.base import Executable, Floats, Ints, Sample, SamplingRow, StepInput
from octavo.engine.scheduler import Work


class Outcome(NamedTuple):
    """What a piece of work gave: log-probabilities of prompt tokens, the next token, states."""

    work: Work
    scores: list[Sample]
    sample: Sample | None
    states: Floats | None


def step_input(work: list[Work]) -> StepInput:
    """Rows of all sequences one after the other, and those of them that have results.

    Rows to sample are selected first, those to pool after them.
    """
    ids: list[int] = []
    positions: list[int] = []
    spans: list[tuple[int, int, int, int, int]] = []
    block_tables: list[int] = []
    logits_indices: list[int] = []
    sampling: list[SamplingRow] = []
    pooled: list[int] = []
    token_type_ids: list[int] = []
    typed = any(w.sequence.request.token_type_ids for w in work)
    for piece in work:
        sequence, count = piece
        start = sequence.computed
        spans.append((len(ids), count, start, len(block_tables), sequence.adapter))
        for at in piece.scores:
            logits_indices.append(len(ids) + at - 1 - start)
            sampling.append(sequence.scoring(at))
        pooled += [len(ids) + at - start for at in piece.pooled]
        if typed:
            token_type_ids += sequence.request.token_type_ids[start : start + count] or [0] * count
        ids += sequence.tokens[start : start + count]
        positions += range(start, start + count)
        block_tables += sequence.blocks
        if piece.samples:
            logits_indices.append(len(ids) - 1)
            sampling.append(sequence.sampling())

    def array(values: object) -> Ints:
        return np.array(values, np.int32)

    return StepInput(
        array(ids), array(positions), array(spans), array(block_tables),
        array(logits_indices + pooled), sampling, array(token_type_ids), all_logits=False,
    )  # fmt: skip


def decode(
    executable: Executable, work: list[Work], steps: int, ends: list[list[int]]
) -> list[list[Outcome]]:
    """Runs up to `steps` steps in a row; all pieces of work are single tokens that sample."""
    rounds = executable.decode(step_input(work), steps, ends)
    return [[Outcome(w, [], s, None) for w, s in zip(work, each, strict=True)] for each in rounds]


def run(executable: Executable, work: list[Work]) -> list[Outcome]:
    """Runs a step and gives every piece of work what is its own."""
    step = step_input(work)
    samples = iter(executable.step(step))
    first = len(step.sampling)
    out = []
    for w in work:
        scores = list(islice(samples, len(w.scores)))
        sample = next(samples) if w.samples else None
        count = len(w.pooled)
        out.append(Outcome(w, scores, sample, executable.hidden(first, count) if count else None))
        first += count
    return out
