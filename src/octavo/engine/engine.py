"""One model's engine: admits requests, runs steps, reports tokens. Single-threaded."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

from octavo.backends.base import BLOCK, Adapters, Executable, Sample
from octavo.engine.admission import Admission
from octavo.engine.blocks import BlockAllocator
from octavo.engine.constraint import GrammarCompiler
from octavo.engine.drafts import DraftSource
from octavo.engine.events import Ended, Finish, Pooled, Progress, PromptLogprobs, Token, TokenEvent
from octavo.engine.grammar_queue import GrammarQueue
from octavo.engine.images import ImageQueue
from octavo.engine.kv import KVCache, KVState
from octavo.engine.limits import MAX_FORCED, MAX_MULTI_STEPS
from octavo.engine.lookahead import DraftWriter
from octavo.engine.pace import Pace
from octavo.engine.policy import FairPolicy, SchedulingPolicy
from octavo.engine.prefix import PrefixIndex
from octavo.engine.request import Request
from octavo.engine.request_table import RequestTable
from octavo.engine.runner import Outcome, decode, run
from octavo.engine.sampling_state import SamplingState
from octavo.engine.scheduler import NO_DRAFT, ScheduledSpan, Scheduler
from octavo.engine.search import BeamSearches
from octavo.engine.sequence import Sequence
from octavo.engine.speculation import DepthPolicy, Speculation
from octavo.engine.stats import EngineStats
from octavo.errors import RequestError

MULTI_STEP_SECONDS = 0.02  # that a call of several steps comes nearest to
COUNTS = ("steps", "prompt_tokens", "cached_tokens", "generated_tokens", "prepared")
ENCODE_SECONDS = 0.05  # of images between looks at what has come, while nothing else is to do
NO_TOKEN_LEFT = "no token is left that may follow"


class Engine:
    """Serves requests on an executable.

    context: most tokens of a sequence. eos: ids that end one. budget: tokens a step computes.
    clock: seconds, for deadlines and the times of events. grammars: compiles grammars; adapters:
    LoRA adapters; requests for what is not given are refused. multi_step: seconds of steps computed
    in one call. policy: the order in which sequences are scheduled. images: encodes them. depths:
    how many tokens of drafts a step verifies, None for none. sources: of drafts, instead of all
    there are; writer: computes more of them.
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
        policy: SchedulingPolicy | None = None,
        images: ImageQueue | None = None,
        depths: DepthPolicy | None = None,
        sources: list[DraftSource] | None = None,
        writer: DraftWriter | None = None,
    ) -> None:
        limits = executable.limits
        bidirectional = not executable.causal
        self.context = min(context, limits.blocks * BLOCK)
        self.adapters = adapters
        self.grammars = grammars
        self._executable, self._clock = executable, clock
        self._vocabulary, self._eos = vocabulary, eos
        self._allocator = BlockAllocator(limits.blocks)
        self.index = PrefixIndex(self._allocator)
        kv = KVCache(self.index, executable.copy_block, prefix_caching and not bidirectional)
        self._pace = Pace()
        self._speculation = Speculation(kv, limits.selected, depths, sources, writer)
        self.scheduler = Scheduler(
            kv, policy or FairPolicy(), min(budget or limits.tokens, limits.tokens),
            limits.selected, bidirectional, images, self._pace, self._speculation.free,
            clock,
        )  # fmt: skip
        self._admission = Admission(
            vocabulary, self.context, executable.task, grammars is not None, adapters is not None,
            images.encoder.vision if images else None,
        )  # fmt: skip
        self._searches = BeamSearches(self.scheduler, limits.selected)
        self._compiling = GrammarQueue(grammars) if grammars is not None else None
        self._requests = RequestTable(self.scheduler, self._searches, self._compiling, adapters)
        self._images = images
        self._arrivals = count()
        self._multi_step_seconds = multi_step
        self._busy = 0.0  # seconds in steps
        self._left = 0.0  # when the last step ended, if there was more to do
        self._counts = dict.fromkeys(COUNTS, 0)

    # -- requests ---------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError if it can never be served."""
        self._admission.check(request)
        if request.id in self._requests:
            raise RequestError("a request with this id is running", "id")
        sequence = self._sequence(request)
        self._requests.add(sequence)
        self._counts["prompt_tokens"] += len(request.prompt)
        try:
            if request.params.grammar is None:
                self._begin(sequence)
            else:
                assert self._compiling is not None
                self._compiling.add(sequence, request.params.grammar)
        except BaseException:
            self._requests.finish(sequence)
            raise

    def _sequence(self, request: Request) -> Sequence:
        slot, key = -1, ""
        if request.adapter:
            assert self.adapters is not None
            slot, key = self.adapters.acquire(request.adapter)
        images = self._images.place(request) if self._images else ()
        ranges = tuple(image.range for image in images)
        size = len(request.prompt)
        told = self.index.prompt(request.prompt_name, size)
        kv = KVState(list(request.prompt), request.salt + key, images=ranges, prompt=told)
        sampling = SamplingState(request.params, kv.tokens, size, self._vocabulary, self._eos)
        now, arrival = self._clock(), next(self._arrivals)
        return Sequence.of(request, arrival, now, self.context, kv, sampling, slot, images)

    def _begin(self, sequence: Sequence) -> None:
        """Gives a sequence to the scheduler; its grammar, if it has one, is compiled."""
        beams = sequence.request.params.beam is not None
        for token in () if beams else sequence.request.resume:
            sequence.append(token)
        sequence.sampling.mask()  # a failing grammar fails here
        if beams:
            self._searches.begin(sequence)
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its blocks; unknown ids are ignored."""
        if request_id in self._requests:
            self._requests.free(request_id)

    def _finish(self, sequence: Sequence, finish: Finish) -> Ended:
        """Ends a request that gets no further token."""
        sequence = self._requests.free(sequence.id)
        return Ended(sequence.id, finish, None, sequence.cached, sequence.report())

    def _refuse(self, sequence: Sequence, error: str, param: str | None) -> Ended:
        """Ends a request that cannot go on as asked for; `param`: the field at fault."""
        return self._requests.free(sequence.id).refused(error, param)

    def _fail(self, sequence: Sequence, error: Exception) -> Ended:
        """Ends a request that cannot be computed."""
        return self._requests.free(sequence.id).failed(error)

    # -- steps ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return len(self._requests) > 0

    def pack_pending(self) -> bool:
        """Does work left over from loading and prefaults KV blocks, as steps do a little, too.
        Returns True if more remains. To be called while idle."""
        images = self._images
        packing = self._executable.pack_pending() or (images and images.encoder.pack_pending())
        packing = packing or self._executable.prefault_kv(self._allocator.reached, idle=True)
        more = bool(packing or self._speculation.prepare(idle=True))
        self._counts["prepared"] += more
        return more

    def step(self) -> list[TokenEvent]:
        """Computes one step, or a few in one call; returns what they produced."""
        events: list[TokenEvent] = [
            self._finish(s, "deadline") for s in self._requests.expired(self._clock())
        ]
        events += self._begin_compiled()
        events += [self._finish(s, "length") for s in self._requests.complete()]
        began = time.perf_counter()
        if spans := self.scheduler.plan():
            events += self._run(spans)
            self._busy += time.perf_counter() - began
        else:
            self._left = 0.0
        if self.scheduler.stalled:
            # Beside a step for about as long as that took.
            seconds = self._pace.last if spans else ENCODE_SECONDS
            events += [self._fail(s, error) for s, error in self.scheduler.encode(seconds)]
            self._left = 0.0
        return events

    def _run(self, spans: list[ScheduledSpan]) -> list[TokenEvent]:
        now = self._clock()
        for span in spans:
            if span.sequence.admit(now):
                self._counts["cached_tokens"] += span.sequence.cached
        began = time.perf_counter()
        step = self._speculation.draft(spans)
        try:
            outcomes = self._compute(step.spans)
        except Exception as e:
            return self._compute_apart(step.spans, e)
        drafted = any(s.draft.tokens for s in step.spans)
        steps = 1 if drafted else max(1, len(outcomes[0].tokens))
        if not drafted:
            done = self._clock()
            self._pace.took([s.length for s in spans], (done - now) / steps, done)
        self._speculation.compare(step, outcomes)
        events = self._commit_all(outcomes, steps)
        self._counts["prepared"] += self._executable.pack_pending()
        self._executable.prefault_kv(self._allocator.reached, idle=False)
        self._speculation.prepare(idle=False)
        ended = time.perf_counter()
        self._speculation.took(step, outcomes, ended - (self._left or began), steps)
        self._left = ended if self.has_work else 0.0
        return events

    def _begin_compiled(self) -> list[TokenEvent]:
        """Begins sequences whose grammars are compiled, and ends those whose grammars fail."""
        if self._compiling is None or not self._compiling:
            return []
        events: list[TokenEvent] = []
        idle = not (self.scheduler.running or self.scheduler.waiting)
        for sequence, result in self._compiling.take_ready(idle):
            try:
                if isinstance(result, Exception):
                    raise result
                sequence.sampling.constraint = result
                self._begin(sequence)
            except Exception as e:
                self._requests.finish(sequence)
                known, code = isinstance(e, RequestError | ValueError), getattr(e, "code", None)
                refused = sequence.refused(str(e), "grammar", code) if known else None
                events.append(refused or sequence.failed(e))
        return events

    def _compute(self, spans: list[ScheduledSpan]) -> list[Outcome]:
        drafted = any(s.draft.tokens for s in spans)
        if drafted or (steps := self._multi_steps(spans)) == 1:
            return run(self._executable, spans)
        self.scheduler.reserve(spans, steps)
        return decode(self._executable, spans, steps)

    def _samples_independently(self, span: ScheduledSpan) -> bool:
        """True if no token of a sequence changes how the next is drawn."""
        sequence = span.sequence
        text = span.length == 1 and span.samples and not sequence.shows(span.start)
        return text and sequence.sampling.independent

    def _multi_steps(self, spans: list[ScheduledSpan]) -> int:
        """Steps to compute in one call: those that would be planned like this one."""
        scheduler = self.scheduler
        steps = min(MAX_MULTI_STEPS, round(self._multi_step_seconds / self._pace.last))
        if steps < 2 or scheduler.waiting or self._compiling or len(spans) < len(scheduler.running):
            return 1
        if not all(self._samples_independently(s) for s in spans):
            return 1
        steps = min(steps, *(s.sequence.limit - len(s.sequence.kv.tokens) for s in spans))
        return steps if steps > 1 and scheduler.can_repeat(spans, steps) else 1

    def _compute_apart(self, spans: list[ScheduledSpan], error: Exception) -> list[TokenEvent]:
        """After a step that failed: computes its spans one by one, which gives what they would
        have had together, and ends those that fail again."""
        self._speculation.drop(spans)
        events: list[TokenEvent] = []
        for span in spans:
            if span.sequence.id not in self._requests:
                continue  # a beam of a search that has ended
            try:
                if len(spans) == 1 and not span.draft.tokens:
                    raise error
                outcomes = run(self._executable, [span._replace(draft=NO_DRAFT)])
            except Exception as e:
                events.append(self._fail(span.sequence, e))
            else:
                events += self._commit_all(outcomes, 1)
        return events

    # -- results ----------------------------------------------------------------------------

    def _commit_all(self, outcomes: list[Outcome], steps: int) -> list[TokenEvent]:
        """Takes the results of a step, each for its own sequence."""
        events: list[TokenEvent] = []
        now = self._clock()
        self._counts["steps"] += steps
        for outcome in outcomes:
            span = outcome.span
            self.scheduler.kv.advance(span.sequence.kv, span.length)
        for outcome in outcomes:
            try:
                self._commit(outcome, now, events)
            except Exception as e:
                events.append(self._fail(outcome.span.sequence, e))
        return events

    def _commit(self, outcome: Outcome, now: float, events: list[TokenEvent]) -> None:
        span, sequence = outcome.span, outcome.span.sequence
        sequence.computed(span.start, span.length, now)
        if outcome.prompt_logprobs:
            logprobs = [(s.logprob, s.alternatives) for s in outcome.prompt_logprobs]
            sequence.reported_logprobs += len(logprobs)
            events.append(PromptLogprobs(sequence.id, logprobs, sequence.cached))
        if sequence.request.progress and not span.samples:
            done, cached = sequence.kv.computed, sequence.cached
            events.append(Progress(sequence.id, done, cached, sequence.report()))
        if sequence.request.pool:
            events += self._commit_states(outcome)
            return
        if not outcome.tokens or sequence.id not in self._requests:  # a search may have ended
            return
        try:
            if sequence.request.params.beam is not None:
                events += self._commit_candidates(sequence, outcome.tokens[0], now)
            else:
                self._commit_tokens(sequence, outcome.tokens, now, events)
        except ValueError as e:  # the grammar has become too costly
            events.append(self._refuse(sequence, str(e), "grammar"))

    def _commit_tokens(
        self, sequence: Sequence, samples: list[Sample], now: float, events: list[TokenEvent]
    ) -> None:
        """Takes the tokens that a step accepted, in order, then those that need no step."""
        for i, sample in enumerate(samples):
            if i:  # the step that sampled this token has computed the one before it
                self.scheduler.kv.advance(sequence.kv, 1)
            if sample.token < 0:
                blamed = sequence.sampling.restricted_by
                events.append(self._refuse(sequence, NO_TOKEN_LEFT, blamed))
                return
            events.append(event := self._accept(sequence, sample, now))
            if event.finish:
                return
        for _ in range(MAX_FORCED if sequence.sampling.masked else 0):
            if (token := sequence.sampling.jump_forward()) is None:
                break
            events.append(event := self._accept(sequence, Sample(token, 0.0, [], []), now))
            if event.finish:
                return
        sequence.sampling.mask()  # a failing grammar fails here, not in everybody's step

    def _accept(self, sequence: Sequence, sample: Sample, now: float) -> Token:
        """Appends a token; the event has `finish` if that ended the request."""
        self._counts["generated_tokens"] += 1
        finish = sequence.accept(sample.token)
        sequence.stamp(now)
        if finish:
            self._requests.finish(sequence)
            self._speculation.finish(sequence)
            self.scheduler.finish(sequence)
        return Token(
            sequence.id, sample.token, sample.logprob, sample.alternatives, finish, sequence.cached,
            sequence.report(), sequence.predicted,
        )  # fmt: skip

    def _commit_candidates(
        self, sequence: Sequence, sample: Sample, now: float
    ) -> list[TokenEvent]:
        """Takes the candidates of a beam; texts come when the best have been found."""
        sequence.stamp(now)
        texts = self._searches.commit(sequence, sample)
        if texts is None:
            return []
        self._requests.finish(self._requests[sequence.id])
        self._counts["generated_tokens"] += sum(len(t.tokens) for t in texts)
        return [*texts] or [sequence.refused(NO_TOKEN_LEFT, sequence.sampling.restricted_by)]

    def _commit_states(self, outcome: Outcome) -> list[TokenEvent]:
        """Collects states; the vector comes with the last of them."""
        sequence = outcome.span.sequence
        sequence.add_states(outcome.states, first=outcome.span.start == 0)
        if sequence.kv.pending:
            return []
        self._requests.finish(sequence)
        self.scheduler.finish(sequence)
        return [Pooled(sequence.id, sequence.vector, sequence.cached, sequence.report())]

    def stats(self) -> EngineStats:
        """Counts since the start, and what is held now."""
        free = self._allocator.free_count
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self._compiling or ()),
            blocks=self._allocator.count,
            blocks_free=free,
            blocks_cached=self.index.available - free,
            blocks_reached=self._allocator.reached,
            busy_us=int(1e6 * self._busy),
            preemptions=self.scheduler.preemptions,
            **self._pace.stats(len(self.scheduler.running)),
            **self._counts,
            **(self.grammars.counts if self.grammars else {}),
            **(self._images.counts if self._images else {}),
            **self._speculation.stats(),
        )
