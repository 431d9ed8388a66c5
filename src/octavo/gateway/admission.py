"""Requests wait here, not at an upstream: whoever is free first takes the next one."""

from __future__ import annotations

import asyncio
import math
import time
from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count

import msgspec

from octavo.errors import InvalidValue, Overloaded
from octavo.gateway.body import Relayed
from octavo.gateway.errors import KeeperGone, NoUpstream, UnknownModel
from octavo.gateway.upstream import Upstream
from octavo.gateway.upstreams import UpstreamLease, Upstreams

Pools = tuple[str, ...]
LATELY = 30.0  # seconds over which it is counted how many requests end


@dataclass(frozen=True)
class WaitLimits:
    """requests: that wait at most. seconds: each of them at most."""

    requests: int = 1024
    seconds: float = 30.0


@dataclass(order=True)
class _Waiting:
    priority: int
    number: int
    turn: asyncio.Future[None] = field(compare=False)


class UpstreamQueue:
    """Gives requests upstreams: lower priorities first, then in order of arrival.

    pools: of a request, the one that it is to go to and those for when nobody in that can.
    """

    def __init__(self, upstreams: Upstreams, limits: WaitLimits) -> None:
        self._upstreams, self.limits = upstreams, limits
        # By pools, model and keeper; in order.
        self._lines: dict[tuple[Pools, str, str], list[_Waiting]] = {}
        self._closed = False
        self._numbers = count()
        self._rate, self._at = 0.0, time.monotonic()  # requests that ended, a second
        upstreams.freed = self._freed

    @property
    def waiting(self) -> int:
        return sum(map(len, self._lines.values()))

    def waits_for(self, pool: str) -> bool:
        """Whether a request waits that is to go to a pool."""
        return any(pools[0] == pool for pools, _, _ in self._lines)

    @property
    def only_model(self) -> str:
        """The model of requests that name none. Raises InvalidValue if there are several."""
        models = sorted(self._upstreams.models)
        if len(models) != 1:
            names = ", ".join(models[:8]) or "none yet"
            raise InvalidValue(f"the request names no model; known models: {names}", "model")
        return models[0]

    def candidates(self, asked: Relayed, pools: Pools) -> list[Upstream]:
        """Upstreams that may take a request now."""
        model = asked.outline.model
        up = [self._upstreams.get(asked.keeper)] if asked.keeper else self._up(pools)
        return [one for one in up if one is not None and one.state == "up" and one.serves(model)]

    def _up(self, pools: Pools) -> list[Upstream]:
        return [up for up in self._upstreams if up.state == "up" and up.place.pool in pools]

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

    def close(self) -> None:
        """Nobody waits any longer: all get Overloaded."""
        self._closed = True
        for line in self._lines.values():
            for one in line:
                if not one.turn.done():
                    one.turn.set_result(None)

    def _check_open(self) -> None:
        if self._closed:
            raise Overloaded("the gateway is shutting down", code="shutting_down")

    def _freed(self) -> None:
        for line in self._lines.values():
            self._call(line)

    @staticmethod
    def _call(line: list[_Waiting]) -> None:
        """The first of a line has its turn."""
        if line and not line[0].turn.done():
            line[0].turn.set_result(None)

    def _look(self, asked: Relayed, pools: Pools, barred: Collection[str]) -> UpstreamLease | None:
        """A place in the first of the pools that has one, else at one that is barred; None: all are
        busy or down. Raises UnknownModel for a model that nobody serves, once it is known, and
        KeeperGone if the only one that can answer was removed."""
        model, known = asked.outline.model or "", False
        passes: tuple[Collection[str], ...] = (barred, ()) if barred else ((),)
        if asked.keeper:
            if (keeper := self._upstreams.get(asked.keeper)) is None:
                raise KeeperGone(asked.keeper)
            passes = ({up.id for up in self._upstreams if up is not keeper},)
        for kept_out in passes:
            for each in pools:
                found = self._upstreams.choose(each, model, asked.ask, kept_out)
                if found.lease is not None:
                    return found.lease
                known |= found.known
        states = set() if known else {up.state for up in self._upstreams}
        if "up" in states and "starting" not in states:
            names = sorted({name for up in self._up(pools) for name in up.models})
            raise UnknownModel(model, names, pools[0] if model in self._upstreams.models else "")
        return None

    def spare(self, asked: Relayed, pools: Pools, barred: Collection[str]) -> UpstreamLease | None:
        """An upstream of the first pool beside those that are barred, if one is free and nobody
        waits."""
        if self.waiting or asked.keeper:
            return None
        ask = msgspec.structs.replace(asked.ask, session="")  # which stays where it is
        return self._upstreams.choose(pools[0], asked.outline.model or "", ask, barred).lease

    async def place(
        self, asked: Relayed, pools: Pools, barred: Collection[str] = ()
    ) -> UpstreamLease:
        """An upstream for a request, as soon as there is one. barred: rather others than these.

        Raises UnknownModel, KeeperGone, NoUpstream if it would wait too long, and Overloaded at the
        end.
        """
        self._check_open()
        # Who waits for one pool, or one upstream, is in no other's way.
        key = pools, asked.outline.model or "", asked.keeper
        if not self._lines.get(key) and (lease := self._look(asked, pools, barred)) is not None:
            return lease
        if (full := self.waiting) >= self.limits.requests:
            raise NoUpstream(f"{full:,} requests wait already", "overloaded", self.retry_after)
        line = self._lines.setdefault(key, [])
        one = _Waiting(asked.priority, next(self._numbers), self._turn())
        insort(line, one)
        try:
            return await self._wait(one, asked, pools, barred)
        finally:
            line.remove(one)
            self._call(line)
            if not line:
                self._lines.pop(key, None)

    async def _wait(
        self, one: _Waiting, asked: Relayed, pools: Pools, barred: Collection[str]
    ) -> UpstreamLease:
        try:
            async with asyncio.timeout(self.limits.seconds):
                while True:
                    await one.turn
                    self._check_open()
                    if (lease := self._look(asked, pools, barred)) is not None:
                        return lease
                    one.turn = self._turn()
        except TimeoutError:
            seconds = self.limits.seconds
            if self.candidates(asked, pools):
                text = f"every upstream was busy for {seconds:g} s"
                raise NoUpstream(text, "overloaded", self.retry_after) from None
            text = f"no upstream answered for {seconds:g} s"
            raise NoUpstream(text, "no_upstream", 2.0) from None

    @staticmethod
    def _turn() -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()
