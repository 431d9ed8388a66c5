"""Which tokens to compute next: policy only, deterministic, on a clock the caller owns.

There is no prefill or decode mode. Every sequence has tokens to catch up on, and a step spends one
budget on catching up; chunked prefill, cache hits and preemption all follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from octavo.backends.base import BLOCK
from octavo.engine.prefix import Match, PrefixIndex
from octavo.engine.sequence import Sequence

CopyBlock = Callable[[int, int], None]


class Work(NamedTuple):
    """Compute `length` tokens of a sequence from `sequence.computed` on."""

    sequence: Sequence
    length: int

    @property
    def samples(self) -> bool:
        """Whether the next token is drawn after it."""
        s = self.sequence
        return self.length == s.pending and len(s.tokens) < s.limit

    @property
    def scores(self) -> range:
        """Prompt tokens whose log-probabilities it gives."""
        s = self.sequence
        if not s.unscored:
            return range(0)
        end = min(s.computed + self.length + 1, len(s.request.prompt))
        return range(max(s.scored, s.computed + 1), end)

    @property
    def pooled(self) -> range:
        """Tokens whose states it gives."""
        s, end = self.sequence, self.sequence.computed + self.length
        match s.request.pool:
            case "mean":
                return range(s.computed, end)
            case "cls":
                return range(0, 1 if s.computed == 0 else 0)
            case "last":
                return range(end - 1, end) if self.length == s.pending else range(0)
        return range(0)


class Scheduler:
    """Sequences waiting and running, and the blocks they hold."""

    def __init__(
        self,
        index: PrefixIndex,
        copy_block: CopyBlock,
        budget: int,
        sequences: int,
        prefix_caching: bool = True,
        bidirectional: bool = False,
    ) -> None:
        self.index = index
        self._copy_block = copy_block
        self._budget = budget
        self._sequences = sequences
        self._prefix_caching = prefix_caching
        self._bidirectional = bidirectional  # a sequence is computed in one step
        self._spare = 0  # rows of logits that nobody has a claim to in this step
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, finished or not, and gives back its blocks."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._release(sequence)

    def plan(self) -> list[Work]:
        """The work of the next step, with blocks allocated for all of it.

        Sequences with one token to compute come first and leave the others half of a step, so
        that long prompts do not hold them up; within that, and for admission, the order is
        `Sequence.rank`.
        """
        work: list[Work] = []
        decoding = sum(s.pending == 1 for s in self.running)
        left = min(self._budget, decoding + self._budget // 2) if decoding else self._budget
        self._spare = self._sequences - len(self.running)
        order = sorted(self.running, key=lambda s: (s.pending > 1, s.rank))
        for sequence in order:
            if sequence not in self.running or not left or not sequence.pending:
                continue  # preempted for one before it, next step, or a beam that waits for others
            count = self._share(sequence, left)
            if self._grow(sequence, sequence.computed + count):
                work.append(Work(sequence, count))
                left -= count
        work = [w for w in work if w.sequence in self.running]
        self._admit(work, left)
        while not work and self.running and self.waiting:
            # Only beams that wait for others of theirs, which have no room: the last makes some.
            self.preempt(max(self.running, key=lambda s: s.rank))
            self._admit(work, left)
        return work

    def _share(self, sequence: Sequence, left: int) -> int:
        """Tokens to compute of a sequence. Each token to score or to pool takes a row of results,
        of which every running sequence has one for itself."""
        count = min(sequence.pending, left)
        if sequence.unscored or sequence.request.pool == "mean":
            count = min(count, self._spare + 1)
            self._spare -= count - 1
        return count

    def _admit(self, work: list[Work], left: int) -> None:
        self.waiting.sort(key=lambda s: s.rank)
        while self.waiting and left and self._spare > 0:
            sequence = self.waiting[0]
            if self._bidirectional and len(sequence.tokens) > min(left, self._spare):
                return  # it must be computed in one step, the next
            match = self._match(sequence)
            if not self._fits(sequence, match):
                self._give_back(match)
                return
            self._adopt(sequence, match)
            if not self.reserve(sequence, len(sequence.tokens)):
                self._release(sequence)
                return
            self.waiting.pop(0)
            self.running.append(sequence)
            self._spare -= 1
            count = self._share(sequence, left)
            work.append(Work(sequence, count))
            left -= count

    def _match(self, sequence: Sequence) -> Match:
        """What the cache knows of a sequence; one token is always left to compute."""
        if (
            not self._prefix_caching
            or sequence.unscored
            or sequence.request.pool in ("mean", "cls")
        ):
            return Match([], None, 0)
        return self.index.match(sequence.tokens[:-1], sequence.salt)

    def _give_back(self, match: Match) -> None:
        last = [] if match.partial_block is None else [match.partial_block]
        self.index.release([*match.blocks, *last])

    def _fits(self, sequence: Sequence, match: Match) -> bool:
        """Whether the whole sequence could get blocks; asked before any is evicted for it."""
        held = {b for s in self.running for b in s.blocks} | set(match.blocks)
        needed = sequence.blocks_for(len(sequence.tokens)) - len(match.blocks)
        return len(held) + needed <= self.index.capacity

    def _adopt(self, sequence: Sequence, match: Match) -> None:
        """Starts a sequence from what was matched; a partly matching block is copied."""
        sequence.blocks = list(match.blocks)
        sequence.indexed = len(match.blocks)
        sequence.computed = len(match.blocks) * BLOCK
        if match.partial_block is not None:
            block = self.index.allocate()
            if block is not None:
                self._copy_block(match.partial_block, block)
                sequence.blocks.append(block)
                sequence.computed = match.tokens
            self.index.release([match.partial_block])
        if not sequence.admitted:
            sequence.admitted = True
            sequence.cached = min(sequence.computed, len(sequence.request.prompt))

    def reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for `tokens`, without taking any from a running sequence."""
        while len(sequence.blocks) < sequence.blocks_for(tokens):
            block = self.index.allocate()
            if block is None:
                return False
            sequence.blocks.append(block)
        return True

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for `tokens`, preempting the last in rank when there are none."""
        while not self.reserve(sequence, tokens):
            victim = max(self.running, key=lambda s: s.rank)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Back to waiting; what it computed is recomputed, or found in the cache."""
        self.preemptions += 1
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.append(sequence)

    def fork(self, sequence: Sequence) -> Sequence:
        """A copy that shares the computed blocks; a partly filled one is copied.

        Without room for it the copy waits, and finds the blocks it shares in the index.
        """
        child = sequence.fork()
        whole = sequence.computed // BLOCK
        copied = self.index.allocate() if sequence.computed % BLOCK else None
        room = sequence in self.running and len(self.running) < self._sequences
        if not room or (sequence.computed % BLOCK and copied is None):
            if copied is not None:
                self.index.release([copied])
            self.waiting.append(child)
            return child
        child.blocks = sequence.blocks[:whole]
        for block in child.blocks:
            self.index.share(block)
        if copied is not None:
            self._copy_block(sequence.blocks[whole], copied)
            child.blocks.append(copied)
        child.computed, child.indexed = sequence.computed, sequence.indexed
        self.running.append(child)
        return child

    def advance(self, work: Work) -> None:
        """After the step: the tokens are computed, and whole blocks become findable."""
        sequence = work.sequence
        sequence.computed += work.length
        whole = sequence.computed // BLOCK
        if self._prefix_caching and whole > sequence.indexed:
            blocks = sequence.blocks[:whole]
            self.index.insert(sequence.tokens[: whole * BLOCK], blocks, sequence.salt)
            sequence.blocks[:whole] = blocks
            sequence.indexed = whole

    def retire(self, sequence: Sequence) -> None:
        """A finished sequence leaves its last, partly filled block to the cache as well."""
        if self._prefix_caching and sequence.computed > sequence.indexed * BLOCK:
            count = sequence.blocks_for(sequence.computed)
            blocks = sequence.blocks[:count]
            self.index.insert(sequence.tokens[: sequence.computed], blocks, sequence.salt)
            sequence.blocks[:count] = blocks
        self.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.index.release(sequence.blocks)
        sequence.blocks = []
        sequence.indexed = sequence.computed = 0
