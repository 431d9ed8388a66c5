"""One model's engine: admits requests, runs steps, reports tokens. Single-threaded."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from itertools import count
from typing import Any

from octavo.backends.base import BLOCK, Adapters, Executable, Sample
from octavo.engine.blocks import BlockPool
from octavo.engine.canonical import mask_of
from octavo.engine.constraint import GrammarCompiler
from octavo.engine.prefix import PrefixIndex
from octavo.engine.request import Finish, Request, SamplingParams, TokenEvent
from octavo.engine.runner import Outcome, decode, run
from octavo.engine.scheduler import Scheduler, Work
from octavo.engine.search import BeamSearches
from octavo.engine.sequence import Sequence
from octavo.errors import RequestError, place

LOG = logging.getLogger(__name__)
MULTI_STEP_SECONDS = 0.02  # seconds
MAX_MULTI_STEPS = 8  # steps
IDLE_WAIT = 0.01  # seconds a step waits for a grammar when there is nothing else to do


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
    clock: seconds, for deadlines. grammars: compiles grammars; adapters: LoRA adapters; requests
    for what is not given are refused. multi_step: seconds of steps computed in one call.
    """

    def __init__(
        self,
        executable: Executable,
        vocabulary: int,
        context: int,
        eos: frozenset[int],
        budget: int | None = None,
        prefix_caching: bool = True,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarCompiler | None = None,
        adapters: Adapters | None = None,
        multi_step: float = MULTI_STEP_SECONDS,
    ) -> None:
        limits = executable.limits
        bidirectional = not executable.causal
        self._executable = executable
        self._vocabulary = vocabulary
        self.context = context
        self._eos = eos
        self._clock = clock
        self.grammars = grammars
        self.adapters = adapters
        self._pool = BlockPool(limits.blocks)
        self.index = PrefixIndex(self._pool)
        self.scheduler = Scheduler(
            self.index, executable.copy_block, min(budget or limits.tokens, limits.tokens),
            limits.selected, prefix_caching and not bidirectional, bidirectional,
        )  # fmt: skip
        self._searches = BeamSearches(self.scheduler, limits.selected, self._ends)
        self._sequences: dict[str, Sequence] = {}
        self._compiling: list[tuple[Sequence, Future[Any]]] = []
        self._arrivals = count()
        self._multi_step_seconds = multi_step
        self._seconds = math.inf  # that the last step took
        self._counts = dict.fromkeys(("steps", "prompt", "cached", "generated"), 0)

    @property
    def _room(self) -> int:
        """Most tokens of a sequence."""
        return min(self.context, self._pool.count * BLOCK)

    def check(self, request: Request) -> None:
        """Raises RequestError for a request that can never be served."""
        request.check(self._vocabulary, self._room)
        if request.adapter and self.adapters is None:
            raise RequestError("this server has no adapters", "model", "model_not_found")
        if self._executable.task != "generate" and not request.pool:
            raise RequestError("this model generates no text", "model", "unsupported_task")
        if request.id in self._sequences:
            raise RequestError("a request with this id is running", None)
        if request.params.grammar is not None and self.grammars is None:
            raise RequestError("this engine has no vocabulary for grammars", "response_format")

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError if it can never be served."""
        self.check(request)
        params, room = request.params, self._room
        wanted = room if params.max_tokens is None else params.max_tokens
        wanted = 0 if request.pool else wanted
        deadline = None if request.timeout is None else self._clock() + request.timeout
        limit = min(len(request.prompt) + wanted, room)
        ids = params.allowed_token_ids
        allowed = None if ids is None else mask_of(ids, (self._vocabulary + 31) // 32)
        sequence = Sequence(
            request, next(self._arrivals), deadline, limit, list(request.prompt), eos=self._eos,
            vocabulary=self._vocabulary, allowed=allowed, submitted=self._clock(),
        )  # fmt: skip
        sequence.scored += request.scored
        sequence.salt = request.salt
        if request.adapter:
            assert self.adapters is not None
            sequence.adapter, key = self.adapters.acquire(request.adapter)
            sequence.salt += key
        self._sequences[request.id] = sequence
        self._counts["prompt"] += len(request.prompt)
        try:
            if params.grammar is None:
                self._begin(sequence)
            else:
                assert self.grammars is not None
                self._compiling.append((sequence, self.grammars.start(params.grammar)))
        except BaseException:
            self._forget(request.id)
            raise

    def _begin(self, sequence: Sequence) -> None:
        """Queues a sequence whose grammar, if it has one, is ready."""
        beams = sequence.request.params.beam is not None
        for token in () if beams else sequence.request.resume:
            sequence.append(token)
        sequence.mask()
        if beams:
            self._searches.begin(sequence)
        self.scheduler.add(sequence)

    def _compiled(self, idle: bool) -> list[TokenEvent]:
        """Queues sequences whose grammar is ready; waits a moment when that is all to do."""
        if idle and self._compiling:
            wait([f for _, f in self._compiling], IDLE_WAIT, FIRST_COMPLETED)
        ready = [(s, f) for s, f in self._compiling if f.done()]
        self._compiling = [(s, f) for s, f in self._compiling if not f.done()]
        events = []
        for sequence, compiled in ready:
            assert self.grammars is not None
            try:
                sequence.constraint = self.grammars.constraint(compiled)
                self._begin(sequence)
            except Exception as e:
                self._forget(sequence.id)
                known = isinstance(e, RequestError | ValueError)
                finish: Finish = "refused" if known else "error"
                events.append(TokenEvent(sequence.id, finish=finish, error=str(e)[:200]))
        return events

    def _forget(self, request_id: str) -> Sequence | None:
        """Takes a request off the list of those that run."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None and sequence.adapter >= 0:
            assert self.adapters is not None
            self.adapters.release(sequence.request.adapter)
        return sequence

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its blocks; unknown ids are ignored."""
        if sequence := self._forget(request_id):
            self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        compiling = len(self._compiling)
        self._compiling = [(s, f) for s, f in self._compiling if s is not sequence]
        if len(self._compiling) < compiling:
            return
        if not self._searches.remove(sequence.id):
            self.scheduler.remove(sequence)

    def pack_pending(self) -> bool:
        """Does some of what can be done while there is no work: what loading left for later, which
        steps go on with too, and what the next blocks need; whether any of it is left."""
        return self._executable.pack_pending() or self._executable.prefault_kv(
            self._pool.reached, idle=True
        )

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> list[TokenEvent]:
        """Computes a step, or a few that need nothing between them; returns what they produced."""
        events = [self._end(s, "deadline") for s in self._expired()]
        events += self._compiled(idle=not (self.scheduler.running or self.scheduler.waiting))
        events += [self._end(s, "length") for s in self._complete()]
        work = self.scheduler.plan()
        if not work:
            return events
        began = time.perf_counter()
        for sequence in (w.sequence for w in work if w.sequence.queued is None):
            sequence.queued = self._clock() - sequence.submitted
        try:
            rounds = self._compute(work)
        except Exception as e:
            return events + self._apart(work, e)
        self._seconds = (time.perf_counter() - began) / len(rounds)
        for outcomes in rounds:
            events += self._take(outcomes)
        self._executable.pack_pending()
        self._executable.prefault_kv(self._pool.reached, idle=False)
        return events

    def _compute(self, work: list[Work]) -> list[list[Outcome]]:
        if (steps := self._multi_steps(work)) == 1:
            return [run(self._executable, work)]
        ends = [self._end_tokens(w.sequence.request.params) for w in work]
        return decode(self._executable, work, steps, ends)

    def _apart(self, work: list[Work], error: Exception) -> list[TokenEvent]:
        """After a step that failed: computes its pieces one by one, which gives what they would
        have had together, and ends those that fail again."""
        events: list[TokenEvent] = []
        for piece in work:
            if piece.sequence.id not in self._sequences:
                continue  # it was a beam of a search that has ended
            try:
                if len(work) == 1:
                    raise error
                outcomes = run(self._executable, [piece])
            except Exception as e:
                events.append(self._fail(piece.sequence, e))
            else:
                events += self._take(outcomes)
        return events

    def _fail(self, sequence: Sequence, error: Exception) -> TokenEvent:
        """Ends a request that cannot be computed."""
        LOG.error("a request could not be computed: %s", place(error))
        return self._end(self._sequences[sequence.id], "error", str(error)[:200])

    def _take(self, outcomes: list[Outcome]) -> list[TokenEvent]:
        """What a step's outcomes mean, each for its own sequence."""
        events: list[TokenEvent] = []
        self._counts["steps"] += 1
        for outcome in outcomes:
            self.scheduler.advance(outcome.work)
        for outcome in outcomes:
            try:
                events += self._commit(outcome)
            except Exception as e:
                events.append(self._fail(outcome.work.sequence, e))
        return events

    def _multi_steps(self, work: list[Work]) -> int:
        """Steps to compute in a row: those that would be planned like this one."""
        scheduler = self.scheduler
        if scheduler.waiting or self._compiling or len(work) < len(scheduler.running):
            return 1
        if not all(w.length == 1 and w.samples and w.sequence.steady for w in work):
            return 1
        left = min(w.sequence.limit - len(w.sequence.tokens) for w in work)
        steps = min(left, MAX_MULTI_STEPS, int(self._multi_step_seconds / self._seconds))
        if steps < 2:
            return 1
        room = all(scheduler.reserve(w.sequence, w.sequence.computed + steps) for w in work)
        return steps if room else 1

    def _expired(self) -> list[Sequence]:
        """Sequences whose deadline has passed."""
        now = self._clock()
        return [s for s in self._sequences.values() if s.deadline is not None and now >= s.deadline]

    def _complete(self) -> list[Sequence]:
        """Replayed sequences that had reached their limit already."""
        return [
            s
            for s in self._sequences.values()
            if len(s.tokens) >= s.limit and not (s.unscored or s.request.pool)
        ]

    def _end(self, sequence: Sequence, finish: Finish, error: str | None = None) -> TokenEvent:
        self._forget(sequence.id)
        self._remove(sequence)
        return TokenEvent(sequence.id, finish=finish, cached=sequence.cached, error=error)

    def _commit(self, outcome: Outcome) -> list[TokenEvent]:
        """What a step's outcome means for its sequence."""
        sequence, sample = outcome.work.sequence, outcome.sample
        events = []
        if outcome.scores:
            sequence.scored += len(outcome.scores)
            scores = [(s.logprob, s.alternatives) for s in outcome.scores]
            events.append(TokenEvent(sequence.id, cached=sequence.cached, scores=scores))
        if sequence.request.pool:
            return self._pool_states(outcome)
        if sample is None or sequence.id not in self._sequences:  # a search may just have ended
            return events
        if not sequence.counts:
            self._counts["cached"] += sequence.cached
        try:
            if sequence.request.params.beam is not None:
                return events + self._search(sequence, sample)
            if sample.token < 0:
                return [*events, self._end(sequence, "refused", "no token is left that may follow")]
            events.append(self._accept(sequence, sample.token, sample.logprob, sample.alternatives))
            while events[-1].finish is None and (token := self._forced(sequence)) is not None:
                events.append(self._accept(sequence, token, 0.0, []))
            sequence.mask()  # what may go wrong with it goes wrong here, not in everybody's step
        except ValueError as e:  # the grammar has become too costly
            events.append(self._end(self._sequences[sequence.id], "refused", str(e)[:200]))
        return events

    def _pool_states(self, outcome: Outcome) -> list[TokenEvent]:
        """Collects states; the vector comes with the last of them."""
        sequence = outcome.work.sequence
        if sequence.computed == outcome.work.length:
            sequence.pooled = None  # the beginning, or the beginning again after a preemption
        if outcome.states is not None:
            sequence.pool(outcome.states)
        if sequence.pending:
            return []
        self._forget(sequence.id)
        self.scheduler.retire(sequence)
        vector, cached = sequence.vector, sequence.cached
        return [TokenEvent(sequence.id, finish="stop", cached=cached, vector=vector)]

    def _search(self, sequence: Sequence, sample: Sample) -> list[TokenEvent]:
        """Beam search: texts come when the best have been found."""
        events = self._searches.advance(sequence, sample)
        if events:
            self._forget(sequence.id)
            self._counts["generated"] += sum(e.token is not None for e in events)
        return events

    def _forced(self, sequence: Sequence) -> int | None:
        """The next token where there is only one: then it needs no step. Log-probabilities do."""
        return None if sequence.request.params.logprobs is not None else sequence.forced()

    def _accept(
        self, sequence: Sequence, token: int, logprob: float, top: list[tuple[int, float]]
    ) -> TokenEvent:
        """Appends a token; the event has `finish` if that ended the sequence."""
        params = sequence.request.params
        self._counts["generated"] += 1
        finish: Finish | None = None
        if sequence.exits(token):
            finish = "stop"
        else:
            sequence.append(token)
        if finish or self._ends(params, token):
            finish = "stop"
        elif sequence.constraint is not None and sequence.constraint.finished:
            finish = "complete"
        elif len(sequence.tokens) >= sequence.limit:
            finish = "length"
        if finish:
            self._forget(sequence.id)
            self.scheduler.retire(sequence)
        return TokenEvent(
            sequence.id, token, logprob, top, finish, sequence.cached, queued=sequence.queued or 0.0
        )

    def _end_tokens(self, params: SamplingParams) -> list[int]:
        return [*params.stop_token_ids, *(() if params.ignore_eos else self._eos)]

    def _ends(self, params: SamplingParams, token: int) -> bool:
        return token in self._end_tokens(params)

    def stats(self) -> EngineStats:
        held = {b for s in self.scheduler.running for b in s.blocks}
        free = self._pool.free_count
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self._compiling),
            blocks=self._pool.count,
            blocks_free=free,
            blocks_cached=self._pool.count - free - len(held),
            steps=self._counts["steps"],
            prompt_tokens=self._counts["prompt"],
            cached_tokens=self._counts["cached"],
            generated_tokens=self._counts["generated"],
            preemptions=self.scheduler.preemptions,
        )
