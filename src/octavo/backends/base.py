"""What every backend takes and gives: one call per step, KV blocks by number, and nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from octavo.program import Task, branches

BLOCK = 16  # tokens per KV block

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Span = tuple[int, int, int, int, int]  # a row of StepInput.spans
NO_INTS: Ints = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes fixed at compile time: tokens of a step, rows with logits in it, KV blocks."""

    tokens: int
    selected: int
    blocks: int


class SamplingRow(NamedTuple):
    """How to pick the next token of one selected row. `top_k` 0: all; `logprobs` -1: none.

    target: a token to report instead of drawing one, -1 to draw. legal: `logprobs` alternatives are
    the best of what mask and adjustments leave. mask: empty, or 32 tokens in every 4 bytes, with
    the bits of those that may be drawn set.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_k: int = 0
    logprobs: int = -1
    target: int = -1
    legal: bool = False
    seed: int = 0
    position: int = 0
    adjustments: list[tuple[int, float, float]] = []  # (token, addend, repetition penalty)
    mask: bytes = b""


class Sample(NamedTuple):
    """The token picked (-1: none may be), its log-probability, the most likely ones with theirs."""

    token: int
    logprob: float
    top_tokens: list[int]
    top_logprobs: list[float]

    @property
    def alternatives(self) -> list[tuple[int, float]]:
        return list(zip(self.top_tokens, self.top_logprobs, strict=True))


@dataclass(frozen=True, slots=True)
class StepInput:
    """Tokens of several sequences, each a span of consecutive positions.

    ids: `[T]`. positions: `[T]`, for rotations and tables of positions. spans: `[S, 5]`, which
    cover the rows in order, of first row, row count, first position in the cache, offset of the
    block table in `block_tables`, slot of the adapter or -1. logits_indices: rows whose results are
    computed; the first `len(sampling)` of them are sampled. token_type_ids: `[T]` segment numbers,
    or empty for all 0. all_logits: the logits of selected rows that are not sampled will be read.

    embeddings: `[E, width]` rows that replace the embeddings of the rows `embedding_rows`, which
    ascend. kv_writes: `[W, 2]` of row, offset of a block table in `block_tables`: stores the row's
    keys and values at its position of that table, too (see `tree_spans`).
    """

    ids: Ints
    positions: Ints
    spans: Ints
    block_tables: Ints
    logits_indices: Ints
    sampling: list[SamplingRow] = field(default_factory=list)
    token_type_ids: Ints = field(default_factory=lambda: NO_INTS)
    all_logits: bool = True
    embeddings: Floats | None = None
    embedding_rows: Ints | None = None
    kv_writes: Ints | None = None


def tree_spans(
    parents: Sequence[int], row: int, position: int, tables: Sequence[int], adapter: int = -1
) -> tuple[list[Span], list[tuple[int, int]]]:
    """Spans and `kv_writes` of a tree of candidates (`octavo.program.tree`) in a step.

    row, position: those of the tree's first token. tables: of each branch the offset of a block
    table in `block_tables`. Each branch is a sequence of its own: its table begins with the blocks
    that hold the positions before the tree, which branches share; from the block of `position` on
    the blocks are its own, and what the first of them holds before the tree is copied into it
    (`copy_block`). Rows that several branches pass through are computed once and stored in each.
    So a branch that is accepted is the sequence, without anything being moved.
    """
    spans: list[Span] = []
    writes: list[tuple[int, int]] = []
    for branch, table in zip(branches(parents), tables, strict=True):
        start = position + len(branch.ancestors)
        spans.append((row + branch.first, branch.count, start, table, adapter))
        writes += [(row + ancestor, table) for ancestor in branch.ancestors]
    return spans, writes


class Executable(Protocol):
    """A compiled program with its weights and its KV cache of `limits.blocks` blocks."""

    limits: Limits
    task: Task
    causal: bool

    def step(self, step: StepInput) -> list[Sample]:
        """Computes the step: writes keys and values, samples the selected rows."""
        ...

    def decode(self, step: StepInput, steps: int, ends: list[list[int]]) -> list[list[Sample]]:
        """Up to `steps` steps of spans of one token, all sampled: what one draws the next computes.

        Stops early after a step that draws, for some row, one of its `ends` or no token.
        """
        ...

    def hidden(self, first: int, count: int) -> Floats:
        """States of the last step's selected rows `[count, width]`, or results of other tasks."""
        ...

    def pack_pending(self) -> bool:
        """Packs up to 16 MiB more weights. Returns True while any remain."""
        ...

    def prefault_kv(self, reached: int, idle: bool) -> bool:
        """Prefaults unused KV blocks from `reached` on, more of them while `idle`. Returns True if
        more remain."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copies a KV block, all layers."""
        ...
