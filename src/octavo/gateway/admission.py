"""Requests wait here, not at an upstream: whoever is free first takes the next one."""

from __future__ import annotations

import asyncio
import math
import time
from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count

from octavo.errors import InvalidValue
from octavo.gateway.body import Asked
from octavo.gateway.errors import NoUpstream, UnknownModel
from octavo.gateway.routes import ModelRoute
from octavo.gateway.upstream import Upstream
from octavo.gateway.upstreams import Choice, Lease, Upstreams

LATELY = 30.0  # seconds over which it is counted how many requests end


@dataclass(frozen=True)
class QueueLimits:
    """requests: that wait at most. seconds: each of them at most."""

    requests: int = 1024
    seconds: float = 30.0


@dataclass(order=True)
class _Waiting:
    priority: int
    number: int
    turn: asyncio.Future[None] = field(compare=False)


class Admission:
    """Gives requests upstreams: lower priorities first, then in order of arrival."""

    def __init__(self, upstreams: Upstreams, limits: QueueLimits) -> None:
        self._upstreams, self._limits = upstreams, limits
        self._lines: dict[str, list[_Waiting]] = {}  # by model, in order
        self._numbers = count()
        self._rate, self._at = 0.0, time.monotonic()  # requests that ended, a second
        upstreams.freed = self._freed

    @property
    def waiting(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def only_model(self) -> str:
        """The model of requests that name none. Raises InvalidValue if there are several."""
        models = sorted(self._upstreams.models)
        if len(models) != 1:
            names = ", ".join(models[:8]) or "none yet"
            raise InvalidValue(f"the request names no model; known models: {names}", "model")
        return models[0]

    def candidates(self, asked: Asked) -> list[Upstream]:
        """Upstreams that serve the model of a request now."""
        model = asked.outline.model
        return [up for up in self._upstreams if up.state == "up" and model in up.models]

    @property
    def retry_after(self) -> float:
        """Seconds until all that wait now have been taken, as fast as of late."""
        self._decay()
        return min(max((self.waiting + 1) / self._rate, 0.5), 60.0) if self._rate else 1.0

    def _decay(self) -> None:
        now = time.monotonic()
        self._rate *= math.exp(-(now - self._at) / LATELY)
        self._at = now

    def ended(self) -> None:
        """A request has been answered."""
        self._decay()
        self._rate += 1 / LATELY  # so that a steady rate is its own sum

    def _freed(self) -> None:
        for line in self._lines.values():
            self._call(line)

    @staticmethod
    def _call(line: list[_Waiting]) -> None:
        """The first of a line has its turn."""
        if line and not line[0].turn.done():
            line[0].turn.set_result(None)

    def _look(self, asked: Asked, route: ModelRoute, pool: str, barred: Collection[str]) -> Choice:
        """An upstream of the pool, else of those it falls back to, else one that is barred."""
        model, seen = asked.outline.model or "", []
        for kept_out in (barred, ()) if barred else ((),):
            for each in (pool, *route.fallback):
                found = self._upstreams.choose(each, model, asked.ask, kept_out)
                if found.lease is not None:
                    return found
                seen.append(found)
        return Choice(None, any(c.known for c in seen), any(c.full for c in seen))

    async def place(
        self, asked: Asked, route: ModelRoute, pool: str, barred: Collection[str] = ()
    ) -> Lease:
        """An upstream for a request, as soon as there is one. barred: rather others than these.

        Raises UnknownModel, and NoUpstream if it would wait too long.
        """
        model = asked.outline.model or ""
        if not self._lines.get(model):
            found = self._look(asked, route, pool, barred)
            if found.lease is not None:
                return found.lease
            self._check_known(found, model)
        if (full := self.waiting) >= self._limits.requests:
            raise NoUpstream(f"{full:,} requests wait already", "overloaded", self.retry_after)
        line = self._lines.setdefault(model, [])
        one = _Waiting(asked.priority, next(self._numbers), self._turn())
        insort(line, one)
        try:
            return await self._wait(one, asked, route, pool, barred)
        finally:
            line.remove(one)
            self._call(line)
            if not line:
                self._lines.pop(model, None)

    async def _wait(
        self, one: _Waiting, asked: Asked, route: ModelRoute, pool: str, barred: Collection[str]
    ) -> Lease:
        found = Choice(None)
        try:
            async with asyncio.timeout(self._limits.seconds):
                while True:
                    await one.turn
                    found = self._look(asked, route, pool, barred)
                    if found.lease is not None:
                        return found.lease
                    self._check_known(found, asked.outline.model or "")
                    one.turn = self._turn()
        except TimeoutError:
            seconds = self._limits.seconds
            if any(up.state == "up" for up in self._upstreams):
                text = f"every upstream was busy for {seconds:g} s"
                raise NoUpstream(text, "overloaded", self.retry_after) from None
            text = f"no upstream answered for {seconds:g} s"
            raise NoUpstream(text, "no_upstream", 2.0) from None

    def _check_known(self, found: Choice, model: str) -> None:
        """Raises UnknownModel for a model that nobody serves, once somebody has answered."""
        states = {up.state for up in self._upstreams}
        if not found.known and "up" in states and "starting" not in states:
            raise UnknownModel(model, sorted(self._upstreams.models))

    @staticmethod
    def _turn() -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()
