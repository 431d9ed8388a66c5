"""Scheduled spans as the arrays a backend takes, and what comes back for each span."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from octavo.backends.base import (
    BLOCK,
    Executable,
    Floats,
    Ints,
    Sample,
    SamplingRow,
    Span,
    StepInput,
    tree_spans,
)
from octavo.engine.images import PlacedImage, rotary_positions
from octavo.engine.scheduler import Draft, ScheduledSpan
from octavo.program import branches


class Outcome(NamedTuple):
    """Results of a span.

    prompt_logprobs: one sample for each position asked for. tokens: sampled one after the other;
    the keys and values of all but the last are computed. Of a span with a draft those are the
    tokens of the draft that were drawn, and one more. states: of the positions to pool. branch: of
    a tree of drafts, the one that was drawn.
    """

    span: ScheduledSpan
    prompt_logprobs: list[Sample]
    tokens: list[Sample]
    states: Floats | None
    branch: int = 0


class _Shown:
    """What a step is given of images: embeddings and their rows, how far each of its rows sees, and
    where rows are along several axes, from a row on."""

    def __init__(self) -> None:
        self.embeddings: list[Floats] = []
        self.rows: list[int] = []
        self._reach: list[tuple[int, range]] = []
        self._spatial: list[tuple[int, Ints]] = []

    def add(self, images: Iterable[PlacedImage], start: int, count: int, row: int) -> None:
        """Adds `count` tokens of a sequence from `start` on. row: of its token 0."""
        for image in images:
            first, last = max(image.start, start), min(image.end, start + count)
            if first >= last:
                continue
            assert image.embeddings is not None
            self.embeddings.append(image.embeddings[first - image.start : last - image.start])
            self.rows += range(row + first, row + last)
            if (own := image.coordinates(first, last)) is not None:
                self._spatial.append((row + first, own))
            if image.mutual:
                self._reach.append((row + first, range(last - first - 1, -1, -1)))

    def reach(self, rows: int) -> Ints | None:
        """How many later rows each of so many sees; None where none sees any."""
        if not self._reach:
            return None
        out = np.zeros(rows, np.int32)
        for row, own in self._reach:
            out[row : row + len(own)] = own
        return out if out.any() else None

    def coordinates(self, positions: Ints) -> Ints | None:
        """Positions along each axis; None where all have one."""
        if not self._spatial:
            return None
        out = np.tile(positions, (len(self._spatial[0][1]), 1))
        for row, own in self._spatial:
            out[:, row : row + own.shape[1]] = own
        return out


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
    kv_writes: list[tuple[int, int]] = []
    shown = _Shown()
    typed = any(s.sequence.request.token_type_ids for s in spans)
    row = 0  # the span's first
    for span in spans:
        sequence, start, draft = span.sequence, span.start, span.draft
        kv, count = sequence.kv, span.length + len(draft.tokens)
        if draft.tables:
            layout += _branches(span, row, block_tables, kv_writes)
        else:
            layout.append(Span(row, count, start, len(block_tables), sequence.adapter))
            block_tables += kv.blocks
        for position in span.prompt_logprobs:
            logits_indices.append(row - start + position - 1)
            sampling.append(sequence.sampling.prompt_logprob_row(position))
        if span.pooled:
            pooled += [row - start + position for position in span.pooled]
        if typed:
            token_type_ids += sequence.request.token_type_ids[start : start + count] or [0] * count
        if sequence.images:
            shown.add(sequence.images, start, count, row - start)
        ids += kv.tokens[start : start + span.length]
        ids += draft.tokens
        positions += _positions(span)
        if span.samples:
            logits_indices += range(row + span.length - 1, row + count)
            sampling.append(sequence.sampling.row())
            sampling += draft.rows
        row += count

    def array(values: object) -> Ints:
        return np.array(values, np.int32)

    return StepInput(
        array(ids), array(positions), layout, array(block_tables),
        array(logits_indices + pooled), sampling, array(token_type_ids), all_logits=False,
        embeddings=np.concatenate(shown.embeddings) if shown.embeddings else None,
        embedding_rows=array(shown.rows) if shown.embeddings else None,
        kv_writes=array(kv_writes) if kv_writes else None,
        reach=shown.reach(row),
        coordinates=shown.coordinates(array(positions)),
    )  # fmt: skip


def _positions(span: ScheduledSpan) -> Sequence[int]:
    """For rotations, of a span's tokens and its draft's."""
    draft, images = span.draft, span.sequence.images
    if not draft.parents and not images:
        return range(span.start, span.start + span.length + len(draft.tokens))
    if not draft.parents:
        return rotary_positions(images, span.start, span.length + len(draft.tokens))
    own, out = rotary_positions(images, span.start, span.length), list[int]()
    for parent in draft.parents:
        out.append((own[-1] if parent < 0 else out[parent]) + 1)
    return own + out


def _branches(
    span: ScheduledSpan, row: int, block_tables: list[int], kv_writes: list[tuple[int, int]]
) -> list[Span]:
    """The branches of a span with a tree of drafts; adds their block tables, and where else their
    keys and values are stored. The span's own tokens are the tree's stem."""
    sequence, last = span.sequence, span.length - 1
    stem = list(range(-1, last))
    parents = stem + [last if p < 0 else p + span.length for p in span.draft.parents]
    blocks, shared = sequence.kv.blocks, sequence.kv.blocks[: span.start // BLOCK]
    tables = []
    for table in (blocks, *(shared + own for own in span.draft.tables)):
        tables.append(len(block_tables))
        block_tables += table
    spans, writes = tree_spans(parents, row, span.start, tables, sequence.adapter)
    kv_writes += writes
    return spans


class DraftSpan(NamedTuple):
    """Tokens of a text from position `start` on, to be continued. blocks: where its keys and values
    lie. row: how the next token is drawn; None if it is not. shift: how much further on rotations
    have the tokens, after images."""

    blocks: list[int]
    start: int
    ids: list[int]
    row: SamplingRow | None
    adapter: int = -1
    shift: int = 0


def draft_input(spans: list[DraftSpan]) -> StepInput:
    """A step that writes on, or catches up with, several texts."""
    ids: list[int] = []
    positions: list[int] = []
    tables: list[int] = []
    drawn: list[int] = []
    layout = []
    for span in spans:
        layout.append(Span(len(ids), len(span.ids), span.start, len(tables), span.adapter))
        ids += span.ids
        first = span.start + span.shift
        positions += range(first, first + len(span.ids))
        tables += span.blocks
        drawn += [len(ids) - 1] if span.row is not None else []
    given, at, table, rows = (np.array(v, np.int32) for v in (ids, positions, tables, drawn))
    sampling = [span.row for span in spans if span.row is not None]
    return StepInput(given, at, layout, table, rows, sampling, all_logits=False)


def _accepted(samples: list[Sample], draft: list[int]) -> list[Sample]:
    """Of samples after a token and after each of a draft, those whose draft was drawn before."""
    if not draft:
        return samples
    pairs = enumerate(zip(samples, draft, strict=False))
    return samples[: 1 + next((i for i, (s, token) in pairs if s.token != token), len(draft))]


def _walk(samples: list[Sample], draft: Draft) -> tuple[list[Sample], int]:
    """Of samples after a token and after each of a tree, those on the path that was drawn; and the
    branch that the path lies in."""
    after = {(p, t): i for i, (p, t) in enumerate(zip(draft.parents, draft.tokens, strict=True))}
    node, out = -1, samples[:1]
    while out and (child := after.get((node, out[-1].token))) is not None:
        node = child
        out.append(samples[node + 1])
    for number, branch in enumerate(branches(draft.parents)):
        if node < branch.first + branch.count and (
            node >= branch.first or node in branch.ancestors
        ):
            return out, number
    return out, 0


def run(executable: Executable, spans: list[ScheduledSpan]) -> list[Outcome]:
    """Computes one step."""
    step = step_input(spans)
    samples = executable.step(step)
    first = len(step.sampling)
    out, at = [], 0
    for span in spans:
        draft, branch = span.draft, 0
        begin = at + len(span.prompt_logprobs)
        end = begin + (1 + len(draft.tokens) if span.samples else 0)
        logprobs, drawn = samples[at:begin], samples[begin:end]
        at = end
        if draft.tables:
            tokens, branch = _walk(drawn, draft)
        else:
            tokens = _accepted(drawn, draft.tokens)
        count = len(span.pooled)
        states = executable.hidden(first, count) if count else None
        out.append(Outcome(span, logprobs, tokens, states, branch))
        first += count
    return out


def decode(executable: Executable, spans: list[ScheduledSpan], steps: int) -> list[Outcome]:
    """Computes up to `steps` steps in one call; all spans are one token and sample."""
    ends = [list(s.sequence.sampling.stop_tokens) for s in spans]
    rounds = executable.decode(step_input(spans), steps, ends)
    columns = zip(*rounds, strict=True)
    return [Outcome(s, [], list(c), None) for s, c in zip(spans, columns, strict=True)]
