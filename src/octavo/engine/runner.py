"""The scheduler's work as the arrays a backend takes."""

from __future__ import annotations

import numpy as np

from octavo.backends.base import Executable, Ints, Sample, StepInput
from octavo.engine.scheduler import Work


def step_input(work: list[Work]) -> StepInput:
    """Rows of all sequences one after the other; the last row of those that sample is selected."""
    ids: list[int] = []
    positions: list[int] = []
    spans: list[tuple[int, int, int, int]] = []
    tables: list[int] = []
    select: list[int] = []
    for sequence, count in work:
        start = sequence.computed
        spans.append((len(ids), count, start, len(tables)))
        ids += sequence.tokens[start : start + count]
        positions += range(start, start + count)
        tables += sequence.blocks
        if count == sequence.pending:
            select.append(len(ids) - 1)
    sampling = [w.sequence.sampling() for w in work if w.samples]

    def array(values: object) -> Ints:
        return np.array(values, np.int32)

    return StepInput(
        array(ids), array(positions), array(spans), array(tables), array(select), sampling
    )


def run(executable: Executable, work: list[Work]) -> list[tuple[Work, Sample | None]]:
    """Runs a step and pairs every piece of work with its sample, if it has one."""
    samples = iter(executable.step(step_input(work)))
    return [(w, next(samples) if w.samples else None) for w in work]
