"""Speculative decoding: steps verify drafts of what comes next, wherever that is worth its time.

The token of each position is drawn as it would be without drafts: from the same logits, with the
random number of that position. A draft is accepted as far as it is what was drawn. So texts and
log-probabilities are those of plain steps, bit for bit, sampled ones too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
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
    balance: float = 0.0

    def allowance(self, share: float) -> float:
        """Seconds that speculation may lose now, but for what it begins with."""
        return self.balance + LEEWAY * (share - self.since)


class DraftCandidate(NamedTuple):
    """What may follow a sequence: the likeliest proposal, the chances of those of its tokens that
    may be verified, and the others."""

    proposal: Proposal | None = None
    chances: list[float] = []
    others: list[Proposal] = []

    def beside(self, proposal: Proposal, chances: list[float]) -> DraftCandidate:
        """This with a proposal more, the better one first."""
        if sum(chances) <= sum(self.chances):
            return self._replace(others=[*self.others, proposal])
        others = [p for p in (*self.others, self.proposal) if p is not None]
        return DraftCandidate(proposal, chances, others)


class DraftedStep(NamedTuple):
    """A step with drafts where they pay. found: for the sequences that were looked at. written:
    seconds that writing drafts took; shares: what each sequence that it was for is charged."""

    spans: list[ScheduledSpan]
    found: dict[Sequence, DraftCandidate] = {}
    written: float = 0.0
    shares: dict[Sequence, float] = {}

    def chances(self) -> list[list[float]]:
        """The chances of what was found for each span, none where nothing was."""
        return [self.found.get(s.sequence, DraftCandidate()).chances for s in self.spans]


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
        self._steps = 0  # in which all sequences were decoding
        self._share = 0.0  # seconds of decoding: of each step what one of its sequences gets
        names = [s.name for s in self._sources] + ([writer.name] if writer is not None else [])
        self.counts = Counts(dict.fromkeys(names, 0), dict.fromkeys(names, 0))

    # -- before a step --------------------------------------------------------------------------

    def draft(self, spans: list[ScheduledSpan]) -> DraftedStep:
        """A planned step with drafts where they pay, and blocks for them; else as it is."""
        if self._policy is None or not (due := self._due(spans)):
            return DraftedStep(spans)
        began = self._clock()
        step = self._look(spans, due, self._policy, began)
        drafted = {s.sequence for s in step.spans if s.draft.tokens}
        for sequence in due:
            self._records[sequence].pause.looked(self._steps, sequence in drafted, len(spans))
        self.counts.lost += self._clock() - began - step.written  # which `took` judges
        return step

    def _due(self, spans: list[ScheduledSpan]) -> list[Sequence]:
        """Sequences for which drafts are looked for now: none without room, or beside a prompt."""
        if self._room(spans) <= 0 or not all(_decodes(s) for s in spans):
            return []
        return [s.sequence for s in spans if self._is_due(s.sequence)]

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
        self, spans: list[ScheduledSpan], due: list[Sequence], policy: DepthPolicy, now: float
    ) -> DraftedStep:
        """A step of sequences that all decode, those that are due with drafts where they pay."""
        rows, room = len(spans), self._room(spans)
        step = DraftedStep(spans, {s: self._propose(s, rows, now) for s in due})
        if self._ahead is not None:
            step = self._write(self._ahead, step, room, now)
        if not any(chances := step.chances()):
            return step
        more = self._forks(step)
        depths = policy.depths([*chances, *(f.chances for f in more)], rows, room, now)
        out = []
        for i, (span, depth) in enumerate(zip(spans, depths, strict=False)):
            further = zip(more, depths[rows:], strict=True)
            chosen = [(fork, d) for fork, d in further if fork.span == i and d]
            proposal = step.found[span.sequence].proposal if depth else None
            out.append(self._with_draft(span, proposal, depth, chosen) if proposal else span)
        return step._replace(spans=out)

    def _forks(self, step: DraftedStep) -> list[Fork]:
        """Where else the sequences may go on, instead of what is proposed."""
        out = []
        for i, span in enumerate(step.spans):
            main, chances, others = step.found.get(span.sequence, DraftCandidate())
            if main is not None and chances and (others or main.second):
                out += forks(i, main, chances, others, self._records[span.sequence].acceptance)
        return out

    def _propose(self, sequence: Sequence, rows: int, now: float) -> DraftCandidate:
        """What the sources propose for a sequence."""
        if (record := self._records.get(sequence)) is None:
            record = _Record(Acceptance(self._known), self._share, Pause(self._steps))
            self._records[sequence] = record
        likeliest, others, best = None, list[Proposal](), 0.0
        for source in self._sources:
            if (proposal := _legal(source.propose(sequence), sequence)) is not None:
                chance = record.acceptance.chance(proposal.source, proposal.match, proposal.place)
                if chance > best:
                    proposal, likeliest, best = likeliest, proposal, chance
                if proposal is not None:
                    others.append(proposal)
        if likeliest is None:
            return DraftCandidate()
        return DraftCandidate(likeliest, self._chances(sequence, likeliest, rows, now), others)

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

    def _write(self, ahead: Lookahead, step: DraftedStep, room: int, now: float) -> DraftedStep:
        """A step with drafts written beside what was found, where that is likely to pay."""
        writer, policy, rows = ahead.writer, self._policy, len(step.spans)
        assert policy is not None
        able = {
            s: most
            for s in step.found
            if writer.serves(s) and (most := self._affordable(s, rows, now, _left(s)))
        }
        if not able or (plain := policy.times.plain(rows)) is None:
            return step
        asked = list(able)[:room]
        most, cost = max(able[s] for s in asked), ahead.cost(asked, plain)
        likely = [self._records[s].acceptance.any(writer.name) for s in asked]
        depth = policy.ahead(likely, step.chances(), rows, room, now, cost.of, most)
        if not (depth := depth or ahead.trial(cost, most)):
            return step
        if not (asked := [s for s in asked if self._kv.extend(s.kv, len(s.kv.tokens) + depth)]):
            return step
        proposals, seconds = ahead.write(asked, depth, plain)
        found = dict(step.found)
        for s, proposal in zip(asked, proposals, strict=True):
            if proposal is not None:
                found[s] = found[s].beside(proposal, self._chances(s, proposal, rows, now))
        shares = dict.fromkeys(asked, cost.of(depth) / len(asked))
        return DraftedStep(step.spans, found, seconds, shares)

    def _with_draft(
        self, span: ScheduledSpan, proposal: Proposal, depth: int, chosen: list[tuple[Fork, int]]
    ) -> ScheduledSpan:
        """A span that also verifies the first `depth` tokens of a proposal and of forks of it, as
        far as they may come and there are free blocks."""
        sequence = span.sequence
        rows = sequence.sampling.rows_after(proposal.tokens[:depth])
        count, end = len(rows), span.start + span.length
        if not count or not self._kv.extend(sequence.kv, end + count):
            return span
        draft = Draft(proposal.tokens[:count], rows, [proposal.source])
        span = span._replace(draft=draft)
        return grow(self._kv, span, draft, chosen) if chosen else span

    # -- after a step ---------------------------------------------------------------------------

    def compare(self, step: DraftedStep, outcomes: list[Outcome]) -> None:
        """Compares what was proposed with what was drawn, and keeps the branch that was."""
        if not step.found:
            return
        began = self._clock()
        for outcome in outcomes:
            sequence, draft = outcome.span.sequence, outcome.span.draft
            keep_branch(self._kv, outcome.span, outcome.branch)
            if (proposal := step.found.get(sequence, DraftCandidate()).proposal) is None:
                continue
            record = self._records[sequence]
            record.acceptance.compare(proposal, [s.token for s in outcome.tokens])
            if outcome.tokens[0].token == proposal.tokens[0]:
                record.pause.end()
            if not draft.tokens:
                continue
            for source, drafted, accepted in tally(draft, outcome.branch, len(outcome.tokens) - 1):
                self.counts.drafted[source] += drafted
                self.counts.accepted[source] += accepted
                if source == "prediction":
                    right, wrong = sequence.predicted
                    sequence.predicted = (right + accepted, wrong + drafted - accepted)
        self.counts.lost += self._clock() - began

    def drop(self, spans: list[ScheduledSpan]) -> None:
        """A step with drafts has failed: what was proposed is looked for again."""
        for span in spans:
            keep_branch(self._kv, span, 0)
            if (record := self._records.get(span.sequence)) is not None:
                record.pause.end()

    def took(self, step: DraftedStep, outcomes: list[Outcome], seconds: float, steps: int) -> None:
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
            times.record(rows + drafted, (seconds - step.written) / steps, now)
        self._share += seconds / rows
        self._steps += steps
        if self._ahead is not None:
            self._ahead.spent(seconds)
        if plain is None or not (drafted or step.shares):
            return
        # By mean times: how long this one step took says more of what else the host does.
        extra, each = times.estimate(rows + drafted, rows, now) - plain, plain / len(spans)
        for outcome in outcomes:
            sequence, count = outcome.span.sequence, len(outcome.span.draft.tokens)
            won = each * (len(outcome.tokens) - 1) - extra * count / drafted if count else 0.0
            if count or sequence in step.shares:
                self._records[sequence].balance += won - step.shares.get(sequence, 0.0)
        gained = sum(len(o.tokens) - 1 for o in outcomes) * each if drafted else 0.0
        self.counts.lost += max(0.0, (extra if drafted else 0.0) + step.written - gained)

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
