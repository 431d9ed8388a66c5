"""A simulated engine: continuous batching on a clock of the caller's.

It has no clock of its own: `step` says how many seconds it takes, and whoever calls it waits as
long or moves a virtual clock. The same jobs give the same steps.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.backends.base import BLOCK
from octavo.engine.block_changes import BlockChanges, CachedPrompt, PromptBlocks

BLOCK_TOKENS = BLOCK  # of the prefix cache


@dataclass(frozen=True)
class Speed:
    """prefill: prompt tokens a second. step: seconds of a step without prompts. slots: requests
    computed at once. chunk: prompt tokens of a step, at most. cache: tokens that the prefix cache
    holds."""

    prefill: float = 2000.0
    step: float = 0.02
    slots: int = 16
    chunk: int = 512
    cache: int = 65_536


@dataclass(frozen=True)
class SimulatedRequest:
    """A request. prompt: its tokens; blocks: a number for each whole block of them, chained, as in
    prefix caches; output: tokens that it will generate. name: of the prompt."""

    id: str
    prompt: int
    output: int
    blocks: Sequence[int] = ()
    name: str = ""


@dataclass
class _Running:
    job: SimulatedRequest
    left: int  # tokens of the prompt to compute
    cached: int
    given: int = 0


@dataclass(frozen=True)
class SimulatedStep:
    """What a step took and gave. tokens: ids of the jobs that got one. finished: those that got
    their last. cached: of the jobs that began, tokens found in the prefix cache. stored, removed:
    blocks of the prefix cache; prompts: that they are of."""

    seconds: float = 0.0
    tokens: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    cached: dict[str, int] = field(default_factory=dict)
    stored: Sequence[int] = ()
    removed: Sequence[int] = ()
    prompts: Sequence[CachedPrompt] = ()


class SimulatedEngine:
    """Requests wait in order of arrival, share steps, and find the prefixes of earlier ones."""

    def __init__(self, speed: Speed | None = None) -> None:
        self.speed = speed or Speed()
        self._waiting: deque[SimulatedRequest] = deque()
        self._running: dict[str, _Running] = {}
        # blocks, those that were used last at the end, with the prompts that they came with
        self._cache: OrderedDict[int, tuple[PromptBlocks | None, int]] = OrderedDict()
        self._changes = BlockChanges()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts that are still to be computed, as far as is known."""
        return sum(j.prompt for j in self._waiting) + sum(r.left for r in self._running.values())

    def submit(self, job: SimulatedRequest) -> None:
        self._waiting.append(job)

    def abort(self, job: str) -> None:
        """Ends a job; unknown ids are ignored."""
        if self._running.pop(job, None) is None:
            self._waiting = deque(j for j in self._waiting if j.id != job)

    def cached(self, blocks: Sequence[int]) -> int:
        """Leading blocks that the prefix cache holds."""
        return next((i for i, b in enumerate(blocks) if b not in self._cache), len(blocks))

    def step(self) -> SimulatedStep:
        """Computes a token of every running job whose prompt is done, and a chunk of prompts."""
        done = SimulatedStep()
        while self._waiting and len(self._running) < self.speed.slots:
            self._begin(self._waiting.popleft(), done)
        if not self._running:
            return done
        budget = self.speed.chunk
        for one in list(self._running.values()):
            if one.left:
                part = min(one.left, budget)
                budget -= part
                one.left -= part
                if one.left:
                    continue
                self._keep(one.job)
            one.given += 1
            done.tokens.append(one.job.id)
            if one.given >= one.job.output:
                done.finished.append(one.job.id)
                del self._running[one.job.id]
        computed = self.speed.chunk - budget
        seconds = self.speed.step + computed / self.speed.prefill
        changes = self._changes.take()
        return SimulatedStep(seconds, done.tokens, done.finished, done.cached, *changes)

    def _begin(self, job: SimulatedRequest, done: SimulatedStep) -> None:
        found = min(self.cached(job.blocks) * BLOCK_TOKENS, job.prompt - 1)  # one token is computed
        done.cached[job.id] = found
        self._running[job.id] = _Running(job, job.prompt - found, found)

    def _keep(self, job: SimulatedRequest) -> None:
        """Stores the blocks of a prompt; ends of prompts are forgotten before their beginnings."""
        cache, changes = self._cache, self._changes
        prompt = changes.prompt(job.name, job.prompt) if job.name else None
        for number, block in enumerate(job.blocks, 1):
            if block not in cache:
                cache[block] = prompt, number
                changes.store(block, prompt, number)
        for block in reversed(job.blocks):
            cache.move_to_end(block)
        while len(cache) * BLOCK_TOKENS > self.speed.cache:
            block, came = cache.popitem(last=False)
            changes.remove(block, *came)
