"""Drafts that a model writes itself, without some parts of its layers.

It needs no memory: keys and values of what was computed are the model's own, and those of what it
writes lie where the step that verifies it will write them again, whole.
"""

from __future__ import annotations

from collections.abc import Collection

from octavo.backends.base import Executable
from octavo.engine.drafts import Proposal, written
from octavo.engine.images import rotary_positions
from octavo.engine.runner import DraftSpan, draft_input
from octavo.engine.sequence import Sequence


class SelfDraft:
    """Drafts of the target. skip: the parts that they do without (`Executable.parts`)."""

    name = "self"

    def __init__(self, executable: Executable, skip: Collection[int]) -> None:
        self._executable = executable
        executable.skip(skip)

    def serves(self, sequence: Sequence) -> bool:
        """True where all but the last token is computed, and that is text."""
        return sequence.kv.pending == 1 and not sequence.shows(sequence.kv.computed)

    def lag(self, sequence: Sequence) -> int:
        return 0

    def free(self, sequence: Sequence) -> None: ...

    def prepare(self, idle: bool) -> bool:
        return False

    def propose(self, sequences: list[Sequence], depth: int) -> list[Proposal | None]:
        spans = [
            DraftSpan(
                s.kv.blocks,
                s.kv.computed,
                s.kv.tokens[-1:],
                s.sampling.draft_row(),
                s.adapter,
                rotary_positions(s.images, s.kv.computed, 1)[0] - s.kv.computed,
            )  # fmt: skip
            for s in sequences
        ]
        ends: list[list[int]] = [[]] * len(spans)
        rounds = self._executable.decode(draft_input(spans), depth, ends, brief=True)
        out: list[Proposal | None] = []
        for drawn in zip(*rounds, strict=True):
            found = [s for s in drawn if s.token >= 0]
            out.append(written(self.name, found) if found else None)
        return out
