"""Time lines of the requests that ended last, the worst of them, and what held those up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from octavo.generate.reply import Usage
from octavo.server.exchange import Exchange, Running, exchange
from octavo.server.memory_spikes import KEPT, MemorySpike
from octavo.server.phases import moments, phases

RECENT, WORST = 256, 32  # time lines that are kept
PARTS = 1024  # of prompts that ended requests had, which may have held up others
KNOWN = 128  # requests of a model that the next is compared with
ENOUGH = 8  # of them, before any is called slow
TIMES, SECONDS = 3.0, 0.1  # slower than the median by so much, and by so long at least
CAUSES = {
    "receive": "the server was long at reading, rendering and tokenizing it, or at loading",
    "queue": "others were before it",
    "prefill": "its own prompt is long, or was computed slowly",
    "other_prompt": "the prompt of another request was computed between two of its tokens",
    "preempted": "its blocks were given to others, and computed again",
    "pause": "a step took long, and no prompt was in it",
    "send": "its client read slowly",
}


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a request, in seconds since it came.

    began: since 1970. phases: seconds of each. ttft: to the first token. parts: of its prompts,
    when they were computed, with their tokens; preempted: when it lost its blocks. tokens: when its
    tokens were sampled, of every `every`th. longest_gap: between two tokens, which ended `at`.
    cause: why it was slow, if it was.
    """

    id: str
    route: str
    model: str
    status: int
    began: float
    seconds: float
    phases: dict[str, float]
    ttft: float | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    parts: list[tuple[float, int]]
    preempted: list[float]
    tokens: list[float]
    every: int
    longest_gap: float
    at: float
    cause: str | None = None


def timeline(one: Exchange, usage: Usage, spent: dict[str, float], cause: str | None) -> Timeline:
    """The time line of a request that has ended. spent: seconds of each phase."""

    def since(moment: float) -> float:
        return round(moment - one.began, 6)

    gaps = usage.gaps
    return Timeline(
        id=one.id, route=one.route, model=one.model or "", status=one.status,
        began=round(time.time() - (time.monotonic() - one.began), 6), seconds=round(one.seconds, 6),
        phases={name: round(seconds, 6) for name, seconds in spent.items()},
        ttft=None if one.ttft is None else round(one.ttft, 6),
        prompt_tokens=usage.prompt, cached_tokens=usage.cached,
        completion_tokens=usage.completion,
        parts=[(since(mark.at), mark.tokens) for mark in usage.marks if mark.tokens],
        preempted=[since(mark.at) for mark in usage.marks if not mark.tokens],
        tokens=list(map(since, gaps.moments)), every=gaps.every,
        longest_gap=round(gaps.longest, 6), at=since(gaps.at) if gaps.at else 0.0, cause=cause,
    )  # fmt: skip


class Norms:
    """What the last requests of a model took, to tell what is out of the ordinary."""

    def __init__(self) -> None:
        self._last: deque[dict[str, float]] = deque(maxlen=KNOWN)

    def excess(self, taken: dict[str, float]) -> tuple[str, float] | None:
        """The part of a request that was the longest beyond the median, with the seconds; None if
        nothing was. The request is one of the known from now on."""
        found: tuple[str, float] | None = None
        if len(self._last) >= ENOUGH:
            for name, seconds in taken.items():
                if seconds <= SECONDS:
                    continue
                known = sorted(last.get(name, 0.0) for last in self._last)
                usual = known[len(known) // 2]
                over = seconds - usual
                if over > max(SECONDS, (TIMES - 1) * usual) and (found is None or over > found[1]):
                    found = name, over
        self._last.append(taken)
        return found


class Timelines:
    """A ring of the last time lines, and the worst.

    running: requests in flight. slow: is told of each that was slow, by model and cause. spikes:
    the last of memory, whoever finds them.
    """

    def __init__(
        self, running: Running, slow: Callable[[str, str], None] = lambda *_: None
    ) -> None:
        self.running = running
        self.recent: deque[Timeline] = deque(maxlen=RECENT)
        self.spikes: deque[MemorySpike] = deque(maxlen=KEPT)
        self._parts: deque[tuple[str, float]] = deque(maxlen=PARTS)  # of prompts, by model
        self._worst: list[tuple[float, Timeline]] = []
        self._norms: dict[str, Norms] = {}
        self._slow = slow

    @property
    def worst(self) -> list[Timeline]:
        """Slow requests, the worst first."""
        return [line for _, line in self._worst]

    def add(self, one: Exchange) -> None:
        """Takes a request that has ended, if it was one for tokens."""
        usage, model = one.usage, one.model
        if usage is None or model is None:
            return
        spent = phases(one)
        taken = spent | {"pause": usage.gaps.longest}
        taken.pop("decode", None)  # as long as the answer
        found = self._norms.setdefault(model, Norms()).excess(taken)
        cause = self._cause(one, usage, found[0]) if found else None
        line = timeline(one, usage, spent, cause)
        self.recent.append(line)
        self._parts += [(model, mark.at) for mark in usage.marks if mark.tokens]
        if found and cause:
            self._worst.append((found[1], line))
            self._worst.sort(key=lambda each: -each[0])
            del self._worst[WORST:]
            self._slow(model, cause)

    def _cause(self, one: Exchange, usage: Usage, part: str) -> str:
        """What a part of a request was long of."""
        at, gap = usage.gaps.at, usage.gaps.longest
        began, ended = {**moments(one), "pause": (at - gap, at)}[part]
        if part in ("prefill", "pause"):
            if any(began <= mark.at <= ended for mark in usage.marks if not mark.tokens):
                return "preempted"
            if part == "pause" and self._prompts(began, ended, one.model):
                return "other_prompt"
        return part

    def _prompts(self, began: float, ended: float, model: str | None) -> bool:
        """Whether a part of another's prompt was computed meanwhile."""
        others = [exchange(scope) for scopes in self.running.values() for scope in scopes]
        parts = [(o.model, mark.at) for o in others if o.usage for mark in o.usage.marks]
        return any(m == model and began < at <= ended for m, at in (*self._parts, *parts))
