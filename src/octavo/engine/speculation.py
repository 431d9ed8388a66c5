"""Speculative decoding: steps verify drafts of what comes next, wherever that is worth its time.

The token of each position is drawn as it would be without drafts: from the same logits, with the
random number of that position. A draft is accepted as far as it is what was drawn. So texts and
log-probabilities are those of plain steps, bit for bit, sampled ones too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

from octavo.engine.cost import Acceptance, StepTimes
from octavo.engine.drafts import DraftSource, Proposal, all_sources
from octavo.engine.kv import KVCache
from octavo.engine.runner import Outcome
from octavo.engine.scheduler import Draft, ScheduledSpan
from octavo.engine.sequence import Sequence

MOST_ROWS = 64  # of a step that verifies drafts: one that computes a prompt has no time to spare
LEEWAY = 0.01  # of its time that a request may lose by speculation


class DepthPolicy(Protocol):
    """Chooses how many tokens of each proposal are verified. No result depends on it."""

    times: StepTimes

    def depths(self, chances: list[list[float]], rows: int, room: int, now: float) -> list[int]:
        """See `CostModel.depths`."""
        ...


@dataclass(eq=False, slots=True)
class _Record:
    """What is known of one sequence. balance: seconds that speculation has won, of `spent`."""

    acceptance: Acceptance
    proposal: Proposal | None = None
    balance: float = 0.0
    spent: float = 0.0


@dataclass(slots=True)
class Counts:
    """Tokens by source, and microseconds that steps with drafts took longer than plain ones would
    have taken for the tokens that were drawn."""

    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    lost: float = 0.0


class Speculation:
    """Adds drafts to the steps of one engine.

    rows: most rows with results in a step. policy: how deep to speculate; None: not at all.
    """

    def __init__(
        self,
        kv: KVCache,
        rows: int,
        policy: DepthPolicy | None,
        sources: list[DraftSource] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._kv = kv
        self._rows = rows
        self._policy = policy
        self._sources = all_sources() if sources is None else sources
        self._clock = clock
        self._known = Acceptance()
        self._records: WeakKeyDictionary[Sequence, _Record] = WeakKeyDictionary()
        names = [s.name for s in self._sources]
        self.counts = Counts(dict.fromkeys(names, 0), dict.fromkeys(names, 0))

    # -- before a step --------------------------------------------------------------------------

    def draft(self, spans: list[ScheduledSpan]) -> list[ScheduledSpan]:
        """A planned step with drafts where they pay, and blocks for them; else as it is."""
        rows = sum(s.length for s in spans)
        room = min(self._rows - len(spans), MOST_ROWS - rows)
        if self._policy is None or room <= 0 or not all(_decodes(s) for s in spans):
            return spans
        chances = [self._propose(s.sequence) for s in spans]
        if not any(chances):
            return spans
        depths = self._policy.depths(chances, rows, room, self._clock())
        return [self._with_draft(s, d) if d else s for s, d in zip(spans, depths, strict=True)]

    def _propose(self, sequence: Sequence) -> list[float]:
        """Takes the likeliest proposal for a sequence; gives the chances of its tokens, none if
        speculation has cost the request more than it may."""
        if not sequence.request.params.speculates:
            return []
        if (record := self._records.get(sequence)) is None:
            record = self._records[sequence] = _Record(Acceptance(self._known))
        record.proposal, best = None, 0.0
        for source in self._sources:
            if (proposal := source.propose(sequence)) is not None:
                chance = record.acceptance.chance(proposal.source, proposal.match)
                if chance > best:
                    record.proposal, best = proposal, chance
        if record.proposal is None or record.balance < -LEEWAY * record.spent:
            return []
        left = sequence.limit - len(sequence.kv.tokens) - 1
        return record.acceptance.chances(record.proposal)[: max(0, left)]

    def _with_draft(self, span: ScheduledSpan, depth: int) -> ScheduledSpan:
        """A span that also verifies the first `depth` tokens of its proposal, as far as they may
        come and there are free blocks."""
        sequence = span.sequence
        proposal = self._records[sequence].proposal
        assert proposal is not None
        rows = sequence.sampling.rows_after(proposal.tokens[:depth])
        count, end = len(rows), span.start + span.length
        if not count or not self._kv.extend(sequence.kv, end + count):
            return span
        return span._replace(draft=Draft(proposal.tokens[:count], rows))

    # -- after a step ---------------------------------------------------------------------------

    def compare(self, outcomes: list[Outcome]) -> None:
        """Compares what was proposed with what was drawn."""
        for outcome in outcomes:
            sequence, drafted = outcome.span.sequence, len(outcome.span.draft.tokens)
            record = self._records.get(sequence)
            if record is None or (proposal := record.proposal) is None:
                continue
            record.proposal = None
            record.acceptance.compare(proposal, [s.token for s in outcome.tokens])
            if drafted:
                accepted = len(outcome.tokens) - 1
                self.counts.drafted[proposal.source] += drafted
                self.counts.accepted[proposal.source] += accepted
                if proposal.source == "prediction":
                    right, wrong = sequence.predicted
                    sequence.predicted = (right + accepted, wrong + drafted - accepted)

    def took(self, outcomes: list[Outcome], seconds: float, steps: int) -> None:
        """Takes the time of a call that computed `steps` steps."""
        if self._policy is None or not all(_decodes(o.span) for o in outcomes):
            return
        times, spans = self._policy.times, [o.span for o in outcomes]
        rows, drafted = sum(s.length for s in spans), sum(len(s.draft.tokens) for s in spans)
        if rows + drafted > MOST_ROWS:
            return
        now, plain = self._clock(), times.plain(rows)
        times.record(rows + drafted, seconds / steps, now)
        for span in spans:
            if (record := self._records.get(span.sequence)) is not None:
                record.spent += seconds
        if not drafted or plain is None:
            return
        # By mean times: how long this one step took says more of what else the host does.
        extra, each = times.estimate(rows + drafted, rows, now) - plain, plain / len(spans)
        for outcome in outcomes:
            if count := len(outcome.span.draft.tokens):
                won = each * (len(outcome.tokens) - 1) - extra * count / drafted
                self._records[outcome.span.sequence].balance += won
        gained = sum(len(o.tokens) - 1 for o in outcomes) * each
        self.counts.lost += max(0.0, extra - gained)

    def stats(self) -> dict[str, int]:
        """Counts under the names of EngineStats."""
        counts = self.counts
        return {
            **{f"drafted_{name}": n for name, n in counts.drafted.items()},
            **{f"accepted_{name}": n for name, n in counts.accepted.items()},
            "speculation_lost_us": int(1e6 * counts.lost),
        }

    def finish(self, sequence: Sequence) -> None:
        """A sequence is complete: later replies may be like its."""
        if self._policy is not None and sequence.request.params.speculates:
            for source in self._sources:
                source.finish(sequence)


def _decodes(span: ScheduledSpan) -> bool:
    """True if a span draws a token and computes nothing of a prompt but its end."""
    return span.samples and span.start >= span.sequence.sampling.prompt - 1
