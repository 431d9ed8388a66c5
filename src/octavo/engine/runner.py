"""Scheduled spans as the arrays a backend takes, and what comes back for each span."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import numpy as np

from octavo.backends.base import Executable, Floats, Ints, Sample, SamplingRow, Span, StepInput
from octavo.engine.images import rotary_positions
from octavo.engine.scheduler import ScheduledSpan


class Outcome(NamedTuple):
    """Results of a span.

    prompt_logprobs: one sample for each position asked for. tokens: sampled one after the other;
    the keys and values of all but the last are computed. Of a span with a draft those are the
    tokens of the draft that were drawn, and one more. states: of the positions to pool.
    """

    span: ScheduledSpan
    prompt_logprobs: list[Sample]
    tokens: list[Sample]
    states: Floats | None


def step_input(spans: list[ScheduledSpan]) -> StepInput:
    """Rows of all sequences one after the other, and those of them that have results.

    Rows to sample are selected first, those to pool after them.
    """
    ids: list[int] = []
    positions: list[int] = []
    layout: list[Span] = []
    block_tables: list[int] = []
    logits_indices: list[int] = []
    sampling: list[SamplingRow] = []
    pooled: list[int] = []
    token_type_ids: list[int] = []
    given: list[Floats] = []
    given_rows: list[int] = []
    reach: list[int] = []
    spatial: list[tuple[int, Ints]] = []
    typed = any(s.sequence.request.token_type_ids for s in spans)
    mutual = any(i.mutual for s in spans for i in s.sequence.images)
    for span in spans:
        sequence, start, draft = span.sequence, span.start, span.draft
        count = span.length + len(draft.tokens)
        kv, row = sequence.kv, len(ids) - start  # row of position 0
        layout.append(Span(len(ids), count, start, len(block_tables), sequence.adapter))
        for position in span.prompt_logprobs:
            logits_indices.append(row + position - 1)
            sampling.append(sequence.sampling.prompt_logprob_row(position))
        pooled += [row + position for position in span.pooled]
        if typed:
            token_type_ids += sequence.request.token_type_ids[start : start + count] or [0] * count
        reach += [0] * (count if mutual else 0)
        for image in sequence.images:
            first, last = max(image.start, start), min(image.end, start + count)
            if first < last:
                assert image.embeddings is not None
                given.append(image.embeddings[first - image.start : last - image.start])
                given_rows += range(row + first, row + last)
                if (own := image.coordinates(first, last)) is not None:
                    spatial.append((row + first, own))
                if image.mutual:
                    reach[row + first : row + last] = range(last - first - 1, -1, -1)
        ids += kv.tokens[start : start + span.length] + draft.tokens
        positions += rotary_positions(sequence.images, start, count)
        block_tables += kv.blocks
        if span.samples:
            logits_indices += range(len(ids) - 1 - len(draft.tokens), len(ids))
            sampling += [sequence.sampling.row(), *draft.rows]

    def array(values: object) -> Ints:
        return np.array(values, np.int32)

    return StepInput(
        array(ids), array(positions), layout, array(block_tables),
        array(logits_indices + pooled), sampling, array(token_type_ids), all_logits=False,
        embeddings=np.concatenate(given) if given else None,
        embedding_rows=array(given_rows) if given else None,
        reach=array(reach) if any(reach) else None,
        coordinates=_coordinates(array(positions), spatial) if spatial else None,
    )  # fmt: skip


def _coordinates(positions: Ints, spatial: list[tuple[int, Ints]]) -> Ints:
    """Positions along each axis, but of some rows those that are given from a row on."""
    out = np.tile(positions, (len(spatial[0][1]), 1))
    for row, own in spatial:
        out[:, row : row + own.shape[1]] = own
    return out


def _accepted(samples: list[Sample], draft: list[int]) -> list[Sample]:
    """Of samples after a token and after each of a draft, those whose draft was drawn before."""
    pairs = enumerate(zip(samples, draft, strict=False))
    return samples[: 1 + next((i for i, (s, token) in pairs if s.token != token), len(draft))]


def run(executable: Executable, spans: list[ScheduledSpan]) -> list[Outcome]:
    """Computes one step."""
    step = step_input(spans)
    samples = iter(executable.step(step))
    first = len(step.sampling)
    out = []
    for span in spans:
        logprobs = list(islice(samples, len(span.prompt_logprobs)))
        drawn = list(islice(samples, 1 + len(span.draft.tokens) if span.samples else 0))
        tokens = _accepted(drawn, span.draft.tokens)
        count = len(span.pooled)
        states = executable.hidden(first, count) if count else None
        out.append(Outcome(span, logprobs, tokens, states))
        first += count
    return out


def decode(executable: Executable, spans: list[ScheduledSpan], steps: int) -> list[Outcome]:
    """Computes up to `steps` steps in one call; all spans are one token and sample."""
    ends = [list(s.sequence.sampling.stop_tokens) for s in spans]
    rounds = executable.decode(step_input(spans), steps, ends)
    columns = zip(*rounds, strict=True)
    return [Outcome(s, [], list(c), None) for s, c in zip(spans, columns, strict=True)]
