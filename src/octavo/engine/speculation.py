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
from octavo.engine.drafts import (
    BEGINS,
    FORCED,
    FREE,
    GOES_ON,
    DraftSource,
    Proposal,
    all_sources,
)
from octavo.engine.kv import KVCache
from octavo.engine.limits import MAX_DRAFT
from octavo.engine.lookahead import DraftWriter, Lookahead
from octavo.engine.pause import Pause
from octavo.engine.runner import Outcome
from octavo.engine.scheduler import Draft, ScheduledSpan
from octavo.engine.sequence import Sequence
from octavo.engine.trees import Fork, forks, grow, keep_branch, tally

MOST_ROWS = 64  # of a step that verifies drafts: one that computes a prompt has no time to spare
LEEWAY = 0.01  # of its time that a request may lose by speculation, beyond what it begins with


class DepthPolicy(Protocol):
    """Chooses how many tokens of each proposal are verified. No result depends on it."""

    times: StepTimes

    def depths(self, chances: list[list[float]], rows: int, room: int, now: float) -> list[int]:
        """See `CostModel.depths`."""
        ...

    def affordable(self, rows: int, now: float, allowance: float, most: int) -> int:
        """See `CostModel.affordable`."""
        ...

    def ahead(
        self, likely: list[float], chances: list[list[float]], rows: int, room: int, now: float,
        cost: Callable[[int], float], most: int,
    ) -> int:  # fmt: skip
        """See `CostModel.ahead`."""
        ...


@dataclass(eq=False, slots=True)
class _Record:
    """What is known of one sequence. since: what `Speculation._share` was when it
    was first looked at. balance: seconds that speculation has won."""

    acceptance: Acceptance
    since: float
    pause: Pause
    proposal: Proposal | None = None
    others: list[Proposal] = field(default_factory=list)
    balance: float = 0.0

    def allowance(self, share: float) -> float:
        """Seconds that speculation may lose now, but for what it begins with."""
        return self.balance + LEEWAY * (share - self.since)


@dataclass(slots=True)
class Counts:
    """Tokens by source. lost: seconds that went to looking for drafts, and that steps with drafts
    took longer than plain ones would have taken for the tokens that were drawn."""

    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    lost: float = 0.0


class Speculation:
    """Adds drafts to the steps of one engine.

    rows: most rows with results in a step. policy: how deep to speculate; None: not at all.
    writer: computes drafts, beside the sources that find them.
    """

    def __init__(
        self,
        kv: KVCache,
        rows: int,
        policy: DepthPolicy | None,
        sources: list[DraftSource] | None = None,
        writer: DraftWriter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._kv = kv
        self._rows = rows
        self._policy = policy
        self._sources = all_sources() if sources is None else sources
        self._clock = clock
        self._known = Acceptance()
        self._records: WeakKeyDictionary[Sequence, _Record] = WeakKeyDictionary()
        self._ahead = Lookahead(writer, clock) if writer is not None else None
        self._written = 0.0  # seconds that drafts for this step took to write
        self._wrote: dict[Sequence, float] = {}  # what they count for, by sequence
        self._steps = 0  # in which all sequences were decoding
        self._looked = policy is not None  # whether this call has looked for drafts
        self._share = 0.0  # seconds of decoding: of each step what one of its sequences gets
        names = [s.name for s in self._sources] + ([writer.name] if writer is not None else [])
        self.counts = Counts(dict.fromkeys(names, 0), dict.fromkeys(names, 0))

    # -- before a step --------------------------------------------------------------------------

    def draft(self, spans: list[ScheduledSpan]) -> list[ScheduledSpan]:
        """A planned step with drafts where they pay, and blocks for them; else as it is."""
        self._written = 0.0
        self._wrote.clear()
        self._looked = False
        if self._policy is None or not (due := self._due(spans)):
            return spans
        self._looked, began = True, self._clock()
        spans = self._look(spans, due, self._policy, began)
        for i in due:
            found = bool(spans[i].draft.tokens)
            self._records[spans[i].sequence].pause.looked(self._steps, found, len(spans))
        self.counts.lost += self._clock() - began - self._written  # which `took` judges
        return spans

    def _due(self, spans: list[ScheduledSpan]) -> list[int]:
        """The places of spans for which drafts are looked for now: of none if there is no room, or
        where a prompt is computed."""
        if self._room(spans) <= 0 or not all(_decodes(s) for s in spans):
            return []
        return [i for i, s in enumerate(spans) if self._is_due(s.sequence)]

    def _room(self, spans: list[ScheduledSpan]) -> int:
        """Rows that drafts may add to a step. What a grammar forced since the last step is computed
        along with drafts and without: rows that have results are what is counted, one a sequence.
        """
        return min(self._rows - len(spans), MOST_ROWS - sum(s.length for s in spans))

    def _is_due(self, sequence: Sequence) -> bool:
        """True if drafts of a sequence are looked for now. A grammar may force any at any time."""
        if not sequence.request.params.speculates:
            return False
        if sequence.sampling.constraint is not None:
            return True
        record = self._records.get(sequence)
        return record is None or record.pause.over(self._steps)

    def _look(
        self, spans: list[ScheduledSpan], due: list[int], policy: DepthPolicy, now: float
    ) -> list[ScheduledSpan]:
        """Spans of sequences that all decode, those that are due with drafts where they pay."""
        rows, room = len(spans), self._room(spans)
        chances: list[list[float]] = [[] for _ in spans]
        for i in due:
            chances[i] = self._propose(spans[i].sequence, rows, now)
        if self._ahead is not None:
            self._write(self._ahead, {i: spans[i].sequence for i in due}, chances, room, now)
        if not any(chances):
            return spans
        found = self._forks(spans, chances)
        each = [*chances, *(f.chances for f in found)]
        depths = policy.depths(each, rows, room, now)
        out = []
        for i, (span, depth) in enumerate(zip(spans, depths, strict=False)):
            further = zip(found, depths[len(spans) :], strict=True)
            chosen = [(fork, d) for fork, d in further if fork.span == i and d]
            out.append(self._with_draft(span, depth, chosen) if depth else span)
        return out

    def _forks(self, spans: list[ScheduledSpan], chances: list[list[float]]) -> list[Fork]:
        """Where else the sequences may go on, instead of what is proposed."""
        out = []
        for i, (span, own) in enumerate(zip(spans, chances, strict=True)):
            record = self._records.get(span.sequence)
            if own and record is not None and record.proposal is not None:
                if record.others or record.proposal.second:
                    out += forks(i, record.proposal, own, record.others, record.acceptance)
        return out

    def _propose(self, sequence: Sequence, rows: int, now: float) -> list[float]:
        """Takes the likeliest proposal for a sequence; gives the chances of its tokens."""
        if (record := self._records.get(sequence)) is None:
            record = _Record(Acceptance(self._known), self._share, Pause(self._steps))
            self._records[sequence] = record
        record.proposal, record.others, best = None, [], 0.0
        for source in self._sources:
            if (proposal := _legal(source.propose(sequence), sequence)) is not None:
                chance = record.acceptance.chance(proposal.source, proposal.match, proposal.place)
                if chance > best:
                    proposal, record.proposal, best = record.proposal, proposal, chance
                if proposal is not None:
                    record.others.append(proposal)
        if record.proposal is None:
            return []
        return self._chances(sequence, record.proposal, rows, now)

    def _chances(
        self, sequence: Sequence, proposal: Proposal, rows: int, now: float
    ) -> list[float]:
        """The chances of those tokens of a proposal that may be verified."""
        most = min(_left(sequence), len(proposal.tokens))
        if proposal.source != FORCED:
            most = self._affordable(sequence, rows, now, most)
        return self._records[sequence].acceptance.chances(proposal, most)

    def _affordable(self, sequence: Sequence, rows: int, now: float, most: int) -> int:
        """How many of `most` tokens of a proposal may be wrong, as the policy says."""
        assert self._policy is not None
        allowance = self._records[sequence].allowance(self._share)
        return self._policy.affordable(rows, now, allowance, most)

    def _write(
        self, ahead: Lookahead, sequences: dict[int, Sequence], chances: list[list[float]],
        room: int, now: float,
    ) -> None:  # fmt: skip
        """Has drafts of sequences, by their places among `chances`, written where that is likely to
        pay, and takes those that are better than what was found."""
        writer, policy, rows = ahead.writer, self._policy, len(chances)
        assert policy is not None
        able = {
            i: most
            for i, s in sequences.items()
            if writer.serves(s) and (most := self._affordable(s, rows, now, _left(s)))
        }
        if not able or (plain := policy.times.plain(rows)) is None:
            return
        served = [(i, sequences[i]) for i in able][:room]
        asked, most = [s for _, s in served], max(able[i] for i, _ in served)
        cost = ahead.cost(asked, plain)
        likely = [self._records[s].acceptance.any(writer.name) for s in asked]
        depth = policy.ahead(likely, chances, rows, room, now, cost.of, most)
        depth = depth or ahead.trial(cost, most)
        if not depth:
            return
        served = [(i, s) for i, s in served if self._kv.extend(s.kv, len(s.kv.tokens) + depth)]
        if not (asked := [s for _, s in served]):
            return
        proposals, self._written = ahead.write(asked, depth, plain)
        self._wrote = dict.fromkeys(asked, cost.of(depth) / len(asked))
        for (i, sequence), proposal in zip(served, proposals, strict=True):
            if proposal is not None:
                record = self._records[sequence]
                found = self._chances(sequence, proposal, rows, now)
                if sum(found) > sum(chances[i]):
                    record.others += [record.proposal] if record.proposal is not None else []
                    record.proposal, chances[i] = proposal, found
                else:
                    record.others.append(proposal)

    def _with_draft(
        self, span: ScheduledSpan, depth: int, chosen: list[tuple[Fork, int]]
    ) -> ScheduledSpan:
        """A span that also verifies the first `depth` tokens of its proposal and of forks of it, as
        far as they may come and there are free blocks."""
        sequence = span.sequence
        proposal = self._records[sequence].proposal
        assert proposal is not None
        rows = sequence.sampling.rows_after(proposal.tokens[:depth])
        count, end = len(rows), span.start + span.length
        if not count or not self._kv.extend(sequence.kv, end + count):
            return span
        draft = Draft(proposal.tokens[:count], rows, [proposal.source])
        span = span._replace(draft=draft)
        return grow(self._kv, span, draft, chosen) if chosen else span

    # -- after a step ---------------------------------------------------------------------------

    def compare(self, outcomes: list[Outcome]) -> None:
        """Compares what was proposed with what was drawn, and keeps the branch that was."""
        if not self._looked:
            return
        began = self._clock()
        self._compare(outcomes)
        self.counts.lost += self._clock() - began

    def _compare(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            sequence, draft = outcome.span.sequence, outcome.span.draft
            keep_branch(self._kv, outcome.span, outcome.branch)
            record = self._records.get(sequence)
            if record is None or record.proposal is None:
                continue
            record.acceptance.compare(record.proposal, [s.token for s in outcome.tokens])
            if outcome.tokens[0].token == record.proposal.tokens[0]:
                record.pause.end()
            record.proposal = None
            if not draft.tokens:
                continue
            for source, drafted, accepted in tally(draft, outcome.branch, len(outcome.tokens) - 1):
                self.counts.drafted[source] += drafted
                self.counts.accepted[source] += accepted
                if source == "prediction":
                    right, wrong = sequence.predicted
                    sequence.predicted = (right + accepted, wrong + drafted - accepted)

    def drop(self, spans: list[ScheduledSpan]) -> None:
        """A step with drafts has failed: what was proposed is forgotten, and looked for again."""
        for span in spans:
            keep_branch(self._kv, span, 0)
            if (record := self._records.get(span.sequence)) is not None:
                record.proposal = None
                record.pause.end()

    def took(self, outcomes: list[Outcome], seconds: float, steps: int) -> None:
        """Takes the time of a call that computed `steps` steps."""
        if self._policy is None or not all(_decodes(o.span) for o in outcomes):
            return
        times, spans = self._policy.times, [o.span for o in outcomes]
        computed, drafted = sum(s.length for s in spans), sum(len(s.draft.tokens) for s in spans)
        if computed + drafted > MOST_ROWS:
            return
        rows = len(spans)
        now, plain = self._clock(), times.plain(rows)
        if computed == rows:  # else some have no results, as runs that a grammar forced
            times.record(rows + drafted, (seconds - self._written) / steps, now)
        self._share += seconds / rows
        self._steps += steps
        if self._ahead is not None:
            self._ahead.spent(seconds)
        if plain is None or not (drafted or self._wrote):
            return
        # By mean times: how long this one step took says more of what else the host does.
        extra, each = times.estimate(rows + drafted, rows, now) - plain, plain / len(spans)
        for outcome in outcomes:
            sequence, count = outcome.span.sequence, len(outcome.span.draft.tokens)
            won = each * (len(outcome.tokens) - 1) - extra * count / drafted if count else 0.0
            if count or sequence in self._wrote:
                self._records[sequence].balance += won - self._wrote.get(sequence, 0.0)
        gained = sum(len(o.tokens) - 1 for o in outcomes) * each if drafted else 0.0
        self.counts.lost += max(0.0, (extra if drafted else 0.0) + self._written - gained)

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

    def free(self, sequence: Sequence) -> None:
        """A sequence holds no more blocks: it has ended, or is preempted."""
        if self._ahead is not None:
            self._ahead.writer.free(sequence)

    def prepare(self, idle: bool) -> bool:
        """Does work left over from loading what writes drafts. Returns True if more remains."""
        return self._ahead is not None and self._ahead.writer.prepare(idle)


def _left(sequence: Sequence) -> int:
    """Most tokens of a draft: the last token of a sequence is drawn after them."""
    return max(0, min(MAX_DRAFT, sequence.limit - len(sequence.kv.tokens) - 1))


def _legal(proposal: Proposal | None, sequence: Sequence) -> Proposal | None:
    """What the grammar allows of a proposal: what can be drawn says how often it is right."""
    if proposal is None or sequence.sampling.constraint is None:
        return proposal
    tokens, place = sequence.sampling.legal(proposal.tokens), FREE
    if sequence.sampling.jumps:
        place = BEGINS if sequence.kv.pending > 1 else GOES_ON
    return proposal._replace(tokens=tokens, place=place) if tokens else None


def _decodes(span: ScheduledSpan) -> bool:
    """True if a span draws a token and computes nothing of a prompt but its end."""
    return span.samples and span.start >= span.sequence.sampling.prompt - 1
