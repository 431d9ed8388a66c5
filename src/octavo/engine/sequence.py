"""A request in progress: its KV state, its sampling state, and what it has reported."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from octavo.backends.base import Floats
from octavo.engine.events import NOT_COMPUTED, Ended, Finish, Mark, Times
from octavo.engine.images import PlacedImage
from octavo.engine.kv import KVState
from octavo.engine.request import Request
from octavo.engine.sampling_state import SamplingState
from octavo.errors import place

LOG = logging.getLogger(__name__)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """One request, or one beam of a beam search.

    arrival: number in order of submission. deadline: on the engine's clock. limit: most tokens,
    prompt included. adapter: slot of the LoRA adapter, -1 without. reported_logprobs: prompt tokens
    whose log-probabilities were reported, counting the first, which has none. pooled: sum of the
    states so far. predicted: tokens of the request's prediction that were accepted, and rejected.
    step: number of the last step that computed something of it. marks: that no event has told of.
    """

    request: Request
    arrival: int
    deadline: float | None
    limit: int
    kv: KVState
    sampling: SamplingState
    adapter: int = -1
    times: Times = Times()
    reported_logprobs: int = 1
    pooled: Floats | None = None
    images: tuple[PlacedImage, ...] = ()
    predicted: tuple[int, int] = (0, 0)
    step: int = 0
    marks: list[Mark] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        request: Request,
        arrival: int,
        now: float,
        context: int,
        kv: KVState,
        sampling: SamplingState,
        adapter: int,
        images: tuple[PlacedImage, ...] = (),
    ) -> Sequence:
        """A request that has come now; context: most tokens of a sequence."""
        wanted = context if request.params.max_tokens is None else request.params.max_tokens
        limit = min(len(kv.tokens) + (0 if request.pool else wanted), context)
        deadline = None if request.timeout is None else now + request.timeout
        reported = 1 + request.resume_prompt_logprobs
        return cls(
            request, arrival, deadline, limit, kv, sampling, adapter, Times(now), reported,
            images=images,
        )  # fmt: skip

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def due(self) -> float:
        """When it is wanted: its first token, until it has that, and its end."""
        wanted = math.inf if self.deadline is None else self.deadline
        first = self.request.ttft
        if first is None or self.times.first_token:
            return wanted
        return min(wanted, self.times.queued + first)

    @property
    def cached(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return self.kv.cached or 0

    def shows(self, position: int) -> bool:
        """True if a token stands for a part of an image."""
        return any(i.start <= position < i.end for i in self.images)

    @property
    def full(self) -> bool:
        """True if it has as many tokens as it may have."""
        return len(self.kv.tokens) >= self.limit

    def append(self, token: int) -> None:
        """Adds a generated token. Raises ValueError if the grammar does not allow it."""
        self.kv.tokens.append(token)
        self.sampling.push(token)

    def accept(self, token: int) -> Finish | None:
        """Adds a token that was chosen, unless it leaves the grammar; how that ends the request, if
        it does. Raises ValueError if the grammar does not allow it."""
        sampling = self.sampling
        if sampling.leaves_grammar(token):
            return "stop"
        self.append(token)
        if token in sampling.stop_tokens:
            return "stop"
        if sampling.constraint is not None and sampling.constraint.finished:
            return "complete"
        return "length" if self.full else None

    def admit(self, now: float) -> bool:
        """Records that it is computed; True for the first time."""
        first = not self.times.admitted
        if first:
            self.times = Times(self.times.queued, now)
        return first

    def fork(self) -> Sequence:
        """A copy that has computed nothing and holds no blocks."""
        kv, images = self.kv.fork(), tuple(image.fork() for image in self.images)
        return replace(
            self, kv=kv, sampling=self.sampling.fork(kv.tokens), images=images,
            marks=[],
        )  # fmt: skip

    def computed(self, start: int, length: int, now: float) -> None:
        """Records that a step has computed tokens from a position on."""
        if start < len(self.request.prompt):
            self.marks.append(Mark(now, length))

    def stamp(self, now: float) -> None:
        """Records that a token was sampled now."""
        t = self.times
        self.times = Times(t.queued, t.admitted, t.first_token or now, now)

    def report(self) -> Times:
        """All times, with the marks since the last report."""
        if not self.marks:
            return self.times
        marks, self.marks = self.marks, []
        return msgspec.structs.replace(self.times, marks=marks)

    @property
    def needs_prompt(self) -> bool:
        """True while a prompt that is only to be computed, for the cache, is not."""
        params = self.request.params
        scores = params.prompt_logprobs is not None
        return params.max_tokens == 0 and not scores and self.kv.pending > 0

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True while requested log-probabilities of prompt tokens are unreported."""
        wanted = self.request.params.prompt_logprobs is not None
        return wanted and self.reported_logprobs < len(self.request.prompt)

    def add_states(self, states: Floats | None, first: bool) -> None:
        """Adds `[n, width]` states one by one, so that the sum does not depend on chunk sizes.
        first: of the sequence, also again after a preemption."""
        if first:
            self.pooled = None
        for state in () if states is None else states:
            self.pooled = state if self.pooled is None else self.pooled + state

    def failed(self, error: Exception) -> Ended:
        """The end of a request that cannot be computed. Why, only the log says: the error's text
        may hold a prompt's."""
        LOG.error("request %s could not be computed: %s", self.id, place(error))
        return Ended(self.id, "error", NOT_COMPUTED, self.cached, self.report())

    def refused(self, error: str, param: str | None, code: str | None = None) -> Ended:
        """The end of a request that cannot go on as asked for; `param`: the field at fault."""
        code = code or "constraint_failed"
        return Ended(self.id, "refused", error[:200], self.cached, self.report(), param, code)

    @property
    def vector(self) -> bytes:
        """The pooled states as fp32, once the whole prompt is computed."""
        assert self.pooled is not None
        count = len(self.request.prompt) if self.request.pool == "mean" else 1
        return (self.pooled / np.float32(count)).astype(np.float32).tobytes()
