"""Which tokens to compute next. Deterministic; the order of sequences is a policy's.

There is no prefill or decode mode. Every sequence has tokens to catch up on, and a step spends one
budget on catching up; chunked prefill, cache hits and preemption all follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from octavo.backends.base import SamplingRow
from octavo.engine.events import Mark
from octavo.engine.images import ImageQueue, PlacedImage
from octavo.engine.kv import KVCache, blocks_for
from octavo.engine.pace import Pace, StepBudget
from octavo.engine.policy import SchedulingPolicy
from octavo.engine.sequence import Sequence

NOTHING = range(0)
MIN_SHARED = 32  # tokens of a prefix that is worth waiting a step for
COMPANY = 1000  # steps for which a tenant that is alone is taken to have others beside it


class Draft(NamedTuple):
    """Tokens that may follow, computed to see whether they do. rows: how to sample after each.

    sources: of the tokens, and of those of each further branch of a tree. parents: of a tree, the
    token that each follows (`octavo.program.tree`). tables: the blocks of each of its branches but
    the first, from the block on in which the span begins.
    """

    tokens: list[int]
    rows: list[SamplingRow]
    sources: list[str] = []
    parents: list[int] = []
    tables: list[list[int]] = []


NO_DRAFT = Draft([], [])


class ScheduledSpan(NamedTuple):
    """Consecutive tokens of a sequence that a step computes, as planned.

    start, length: their positions. samples: the next token is sampled after them. prompt_logprobs:
    positions of prompt tokens whose log-probabilities are computed. pooled: positions whose states
    are pooled. draft: what is verified beside; its positions follow.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool
    prompt_logprobs: range
    pooled: range
    draft: Draft = NO_DRAFT

    @classmethod
    def of(cls, sequence: Sequence, length: int) -> ScheduledSpan:
        """The next `length` tokens of a sequence."""
        kv, request = sequence.kv, sequence.request
        start = kv.computed
        end, last = start + length, length == kv.pending
        logprobs = pooled = NOTHING
        if sequence.needs_prompt_logprobs:
            first = max(sequence.reported_logprobs, start + 1)
            logprobs = range(first, min(end + 1, len(request.prompt)))
        if request.pool:
            pooled = _pooled(request.pool, start, end, last)
        return cls(sequence, start, length, last and not sequence.full, logprobs, pooled)


def _pooled(pool: str, start: int, end: int, last: bool) -> range:
    """Which of the positions [start, end) are pooled. last: no more follow."""
    if pool == "mean":
        return range(start, end)
    if pool == "cls":
        return range(0, 1 if start == 0 else 0)
    return range(end - 1, end) if last else NOTHING


class Scheduler:
    """Waiting and running sequences.

    budget: most tokens of a step. sequences: most that run, and rows of results of a step.
    bidirectional: a sequence is computed in one step. images: encodes them. pace: how long steps
    take. released: is told of each sequence that holds no more blocks.
    """

    def __init__(
        self,
        kv: KVCache,
        policy: SchedulingPolicy,
        budget: int,
        sequences: int,
        bidirectional: bool = False,
        images: ImageQueue | None = None,
        pace: Pace | None = None,
        released: Callable[[Sequence], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kv = kv
        self._pace = pace or Pace()
        self._steps = 0
        self._waited = False  # texts were left out of the last step for a prompt
        self._accompanied = -COMPANY  # the last step at which there were several tenants
        self._policy, self._key = policy, policy.key
        self._budget = budget
        self._sequences = sequences
        self._bidirectional = bidirectional
        self._images = images
        self._released = released
        self._clock = clock
        self._spare_rows = 0  # of results in this step, beside the one of each running sequence
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.stalled: list[Sequence] = []  # those running that wait for an image to be encoded
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self._policy.arrived(sequence)
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Takes out a complete sequence; what it computed stays in the prefix cache."""
        self._take_out(sequence)
        self.kv.finish(sequence.kv)

    def free(self, sequence: Sequence) -> None:
        """Takes out a sequence that is not complete and frees its blocks."""
        self._take_out(sequence)
        self.kv.free(sequence.kv)

    def _take_out(self, sequence: Sequence) -> None:
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._let_go(sequence)
        self._policy.left(sequence)
        if self._images is not None and self._images.encodes(sequence.images):
            others = (i for s in (*self.running, *self.waiting) for i in s.images)
            if not self._images.encodes(others):
                self._images.abandon()

    def _let_go(self, sequence: Sequence) -> None:
        self._released(sequence)
        if self._images is not None:
            self._images.release(sequence.images)

    def encode(self, seconds: float) -> list[tuple[Sequence, Exception]]:
        """Encodes images that sequences wait for, for about so long. Gives the sequences whose
        images cannot be encoded."""
        assert self._images is not None
        stalled = [s for s in self.stalled if s in self.running]  # not failed since
        waiting = [(s, i) for s in stalled for i in s.images if i.end > s.kv.computed]
        owners = {id(i): s for s, i in waiting}

        def begun(image: PlacedImage, rows: int) -> None:
            self._policy.encoded(owners[id(image)], rows)

        failed = self._images.encode([i for _, i in waiting], seconds, begun)
        lost = {s.id: (s, failed[i.key]) for s, i in waiting if i.key in failed}
        return list(lost.values())

    def plan(self) -> list[ScheduledSpan]:
        """The next step, with blocks allocated for all of it.

        Sequences with one token to compute come first and leave the others half of a step at most,
        so that later prompts do not hold them up; within that, and for admission, the policy
        orders.
        """
        spans: list[ScheduledSpan] = []
        self.stalled = []
        self._make_way()
        self._welcome()
        budget, preemptions = self._step_budget(), self.preemptions
        self._spare_rows = self._sequences - len(self.running)
        order = sorted(self.running, key=lambda s: (s.kv.pending > 1, self._key(s)))
        for sequence in order:
            if self.preemptions > preemptions and sequence not in self.running:
                continue
            # 0 are pending for a beam that waits for the others of its search.
            wanted = sequence.kv.pending and sequence not in budget.held
            if not wanted or not (room := budget.room(sequence)):
                continue
            if not (count := self._share(sequence, room, budget.left)):
                continue
            if self._grow(sequence, sequence.kv.computed + count):
                spans.append(ScheduledSpan.of(sequence, count))
                budget.take(sequence, count)
        if self.preemptions > preemptions:
            spans = [s for s in spans if s.sequence in self.running]
            self.stalled = [s for s in self.stalled if s in self.running]
        self._admit(spans, budget)
        while not spans and not self.stalled and self.running and self.waiting:
            # Only beams that wait for others of their search, for which there are no blocks.
            self.preempt(max(self.running, key=self._key))
            self._admit(spans, budget)
        self._steps += 1
        for span in spans:
            span.sequence.step = self._steps
            self._policy.planned(span.sequence, span.length)
        return spans

    def _step_budget(self) -> StepBudget:
        tenants = {s.request.tenant for s in (*self.running, *self.waiting)}
        if len(tenants) > 1:
            self._accompanied = self._steps
        company = self._steps - self._accompanied < COMPANY
        crowded = len(self.running) + len(self.waiting) > self._sequences
        budget = StepBudget(
            self._pace, self._policy, self.running, self._budget, self._waited, company, crowded
        )
        self._waited = budget.pauses
        return budget

    def _make_way(self) -> None:
        """Preempts for the first that waits where there is no place for it or no blocks, if the
        policy says whom."""
        if not self.waiting or not self.running:
            return
        first = min(self.waiting, key=self._key)
        gives_way = self._policy.gives_way
        if len(self.running) >= self._sequences:
            if (victim := gives_way(self.running, first, lambda _: 1, 1)) is None:
                return
            self.preempt(victim)
        wanted = blocks_for(len(first.kv.tokens))
        while self.running and not self.kv.fits(first.kv):
            victim = gives_way(self.running, first, lambda s: len(s.kv.blocks), wanted)
            if victim is None:
                return
            self.preempt(victim)

    def _welcome(self) -> None:
        """Admits the first that waits before this step is shared out, if its tenant has nothing
        that runs: so its prompt may come before what others want."""
        if not self.waiting or not self.running or self._bidirectional:
            return
        first = min(self.waiting, key=self._key)
        if len(self.running) < self._sequences and not any(
            s.request.tenant == first.request.tenant for s in self.running
        ):
            self._start(first)

    def _share(self, sequence: Sequence, left: int, most: int) -> int:
        """Tokens of a sequence to compute: `left` at most, or an image of `most` at most that
        cannot be divided. Each prompt log-probability and each pooled state takes a row of results,
        of which every running sequence has one for itself."""
        count = min(sequence.kv.pending, left)
        if sequence.images and self._images is not None:
            share = self._images.share(sequence.kv, sequence.images, count, most)
            if share < count and any(i.waits for i in sequence.images):
                self.stalled.append(sequence)
            count = share
        if sequence.needs_prompt_logprobs or sequence.request.pool == "mean":
            count = min(count, self._spare_rows + 1)
            self._spare_rows -= max(count - 1, 0)
        return count

    def _admit(self, spans: list[ScheduledSpan], budget: StepBudget) -> None:
        self.waiting.sort(key=self._key)
        for sequence in list(self.waiting):
            left = budget.room(sequence)
            if not left or self._spare_rows <= 0:
                return
            if self._bidirectional and len(sequence.kv.tokens) > min(left, self._spare_rows):
                return  # there will be more in the next step
            prefix_caching = _prefix_caching(sequence)
            stalled = (ScheduledSpan.of(s, s.kv.pending) for s in self.stalled)
            if prefix_caching and any(self._shares(sequence, span) for span in (*spans, *stalled)):
                continue
            if not self._start(sequence):
                return
            self._spare_rows -= 1
            if count := self._share(sequence, left, budget.left):
                spans.append(ScheduledSpan.of(sequence, count))
                budget.take(sequence, count)

    def _start(self, sequence: Sequence) -> bool:
        """Moves a waiting sequence to those that run, if there are blocks for it."""
        prompt = len(sequence.request.prompt)
        if not self.kv.admit(sequence.kv, prompt, _prefix_caching(sequence)):
            return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def _shares(self, sequence: Sequence, span: ScheduledSpan) -> bool:
        """True if a span computes what a waiting sequence will find in the prefix cache, as one of
        the choices of a prompt does for the others: they wait for the step."""
        kv, known = span.sequence.kv, span.start
        others, tokens = kv.keys, sequence.kv.keys
        end = min(known + min(span.length, MIN_SHARED), len(tokens) - 1)
        return (
            self.kv.prefix_caching
            and span.length > 1
            and end > known
            and end >= MIN_SHARED
            and kv.salt == sequence.kv.salt
            and others[known:end] == tokens[known:end]
            and others[:known] == tokens[:known]
        )

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Allocates blocks for `tokens` tokens, preempting the last in order if there are none."""
        while not self.kv.extend(sequence.kv, tokens):
            victim = max(self.running, key=self._key)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Moves a sequence back to waiting, where it starts again from what is cached."""
        self.preemptions += 1
        sequence.marks.append(Mark(self._clock(), 0))
        self.running.remove(sequence)
        self._let_go(sequence)
        self.kv.free(sequence.kv)
        self.waiting.append(sequence)

    def fork(self, sequence: Sequence) -> Sequence:
        """A copy that shares computed blocks, or waits if it cannot run beside the others."""
        child = sequence.fork()
        runs = sequence in self.running and len(self.running) < self._sequences
        runs = runs and self.kv.fork(sequence.kv, child.kv)
        self._policy.arrived(child)
        (self.running if runs else self.waiting).append(child)
        return child

    def can_repeat(self, spans: list[ScheduledSpan], steps: int) -> bool:
        """True if there are blocks for `steps` steps of spans of one token. Allocates nothing."""
        missing = sum(s.sequence.kv.missing(s.start + steps) for s in spans)
        return missing <= self.kv.available

    def reserve(self, spans: list[ScheduledSpan], steps: int) -> None:
        """Allocates the blocks that `can_repeat` found."""
        for span in spans:
            self.kv.extend(span.sequence.kv, span.start + steps)


def _prefix_caching(sequence: Sequence) -> bool:
    """Results of cached tokens are not cached, so who needs those computes them."""
    pooled = sequence.request.pool in ("mean", "cls")
    return not (sequence.needs_prompt_logprobs or pooled)
