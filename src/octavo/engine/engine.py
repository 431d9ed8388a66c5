"""One model's engine: admits requests, runs steps, reports tokens. Single-threaded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from octavo.backends.base import BLOCK, Executable, Sample
from octavo.engine.blocks import BlockPool
from octavo.engine.prefix import PrefixIndex
from octavo.engine.request import Finish, Request, TokenEvent
from octavo.engine.runner import run
from octavo.engine.scheduler import Scheduler, Work
from octavo.engine.sequence import Sequence
from octavo.errors import RequestError


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the start, and what is held now."""

    running: int
    waiting: int
    blocks: int
    blocks_free: int
    blocks_cached: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int

    @property
    def blocks_held(self) -> int:
        """Blocks that running sequences hold."""
        return self.blocks - self.blocks_free - self.blocks_cached


class Engine:
    """Serves requests on an executable.

    context: most tokens of a sequence. eos: ids that end one. budget: tokens a step computes.
    reuse: whether computed prefixes are found again. clock: seconds, for deadlines.
    """

    def __init__(
        self,
        executable: Executable,
        vocabulary: int,
        context: int,
        eos: frozenset[int],
        budget: int | None = None,
        reuse: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = executable.limits
        self._executable = executable
        self._vocabulary = vocabulary
        self.context = context
        self._eos = eos
        self._clock = clock
        self._pool = BlockPool(limits.blocks)
        self.index = PrefixIndex(self._pool)
        self.scheduler = Scheduler(
            self.index, executable.copy_block, min(budget or limits.tokens, limits.tokens),
            limits.selected, reuse,
        )  # fmt: skip
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = count()
        self._counts = dict.fromkeys(("steps", "prompt", "cached", "generated"), 0)

    def check(self, request: Request) -> None:
        """Raises RequestError for a request that can never be served."""
        request.params.check(self._vocabulary)
        prompt, wanted = len(request.prompt), request.params.max_tokens or 1
        if not prompt:
            raise RequestError("the prompt is empty", "prompt", "invalid_value")
        if any(not 0 <= t < self._vocabulary for t in request.prompt):
            raise RequestError(f"a prompt token is outside 0 to {self._vocabulary - 1}", "prompt")
        room = min(self.context, self._pool.count * BLOCK)
        if prompt + wanted > room:
            raise RequestError(
                f"This request needs {prompt + wanted:,} tokens (prompt {prompt:,} + max_tokens "
                f"{wanted:,}); the limit is {room:,}. Lower max_tokens or shorten the prompt.",
                "messages",
                "context_length_exceeded",
            )
        if request.timeout is not None and not (
            math.isfinite(request.timeout) and request.timeout > 0
        ):
            raise RequestError("timeout must be a positive number of seconds", "timeout")
        if request.id in self._sequences:
            raise RequestError("a request with this id is running", None)

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError if it can never be served."""
        self.check(request)
        room = min(self.context, self._pool.count * BLOCK)
        wanted = request.params.max_tokens or room
        deadline = None if request.timeout is None else self._clock() + request.timeout
        limit = min(len(request.prompt) + wanted, room)
        sequence = Sequence(request, next(self._arrivals), deadline, limit, list(request.prompt))
        for token in request.resume:
            sequence.append(token)
        self._sequences[request.id] = sequence
        self.scheduler.add(sequence)
        self._counts["prompt"] += len(request.prompt)

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its blocks; unknown ids are ignored."""
        if sequence := self._sequences.pop(request_id, None):
            self.scheduler.remove(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> list[TokenEvent]:
        """Computes one step and returns what it produced."""
        events = [self._end(s, "deadline") for s in self.scheduler.expired(self._clock())]
        events += [self._end(s, "length") for s in self._complete()]
        work = self.scheduler.plan()
        if not work:
            return events
        try:
            results = run(self._executable, work)
        except (ValueError, MemoryError) as e:
            return events + [self._end(w.sequence, "error", str(e)[:200]) for w in work]
        self._counts["steps"] += 1
        for done, sample in results:
            self.scheduler.advance(done)
            if sample is not None:
                events.append(self._commit(done, sample))
        return events

    def _complete(self) -> list[Sequence]:
        """Replayed sequences that had reached their limit already."""
        return [s for s in self._sequences.values() if len(s.tokens) >= s.limit]

    def _end(self, sequence: Sequence, finish: Finish, error: str | None = None) -> TokenEvent:
        del self._sequences[sequence.id]
        self.scheduler.remove(sequence)
        return TokenEvent(sequence.id, finish=finish, cached=sequence.cached, error=error)

    def _commit(self, work: Work, sample: Sample) -> TokenEvent:
        sequence, params = work.sequence, work.sequence.request.params
        if not sequence.counts:
            self._counts["cached"] += sequence.cached
        self._counts["generated"] += 1
        sequence.append(sample.token)
        finish: Finish | None = None
        if sample.token in params.stop_token_ids:
            finish = "stop"
        elif sample.token in self._eos and not params.ignore_eos:
            finish = "stop"
        elif len(sequence.tokens) >= sequence.limit:
            finish = "length"
        if finish:
            del self._sequences[sequence.id]
            self.scheduler.retire(sequence)
        top = list(zip(sample.top_tokens, sample.top_logprobs, strict=True))
        return TokenEvent(sequence.id, sample.token, sample.logprob, top, finish, sequence.cached)

    def stats(self) -> EngineStats:
        held = {b for s in self.scheduler.running for b in s.blocks}
        free = self._pool.free_count
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            blocks=self._pool.count,
            blocks_free=free,
            blocks_cached=self._pool.count - free - len(held),
            steps=self._counts["steps"],
            prompt_tokens=self._counts["prompt"],
            cached_tokens=self._counts["cached"],
            generated_tokens=self._counts["generated"],
            preemptions=self.scheduler.preemptions,
        )
