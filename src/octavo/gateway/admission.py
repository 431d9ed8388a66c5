"""Requests wait here, not at an upstream: whoever is free first takes the next one."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from octavo.errors import DeadlineExceeded, InvalidValue, Overloaded, RequestError
from octavo.gateway.answer_rate import AnswerRate
from octavo.gateway.body import Relayed
from octavo.gateway.errors import KeeperGone, NoUpstream, UnknownModel
from octavo.gateway.line import Pools, Waiter, WaitingLines, key_of_line
from octavo.gateway.upstream import Upstream
from octavo.gateway.upstreams import UpstreamLease, Upstreams


@dataclass(frozen=True)
class WaitLimits:
    """requests: that wait at most. seconds: each of them at most."""

    requests: int = 1024
    seconds: float = 30.0


class UpstreamQueue:
    """Gives requests upstreams: lower priorities first, then each sender in turn. Where too many
    wait, who is the last of all gives way.

    pools: of a request, the one that it is to go to and those for when nobody in that can.
    """

    def __init__(self, upstreams: Upstreams, limits: WaitLimits) -> None:
        self._upstreams, self.limits = upstreams, limits
        self.known: Callable[[str], bool] = upstreams.has  # whether there is such a pool
        self._lines, self._answers = WaitingLines(), AnswerRate()
        self._closed = False
        upstreams.freed = self._freed

    @property
    def waiting(self) -> int:
        return len(self._lines)

    def waits_for(self, pool: str) -> bool:
        """Whether a request waits that is to go to a pool."""
        return any(pools[0] == pool for pools, *_ in self._lines)

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
        return [
            one for one in up if one is not None and one.state == "up" and one.serves(model)
            and (one.own or not asked.begun)
        ]  # fmt: skip

    def _up(self, pools: Pools) -> list[Upstream]:
        return [up for up in self._upstreams if up.state == "up" and up.place.pool in pools]

    @property
    def retry_after(self) -> float:
        """Seconds until all that wait now have been taken, as fast as of late."""
        rate = self._answers.rate
        return min(max((self.waiting + 1) / rate, 0.5), 60.0) if rate else 1.0

    def answered(self) -> None:
        """A request that had a place has been answered."""
        self._answers.answered()

    def close(self) -> None:
        """Nobody waits any longer: all get Overloaded."""
        self._closed = True
        self._freed()

    def _check_open(self) -> None:
        if self._closed:
            raise Overloaded("the gateway is shutting down", code="shutting_down")

    def _freed(self) -> None:
        """Somebody may have a place."""
        if self._lines:
            self._lines.serve(self._give)
            self._answers.waits(bool(self._lines))

    def _give(self, one: Waiter) -> bool:
        """Whether a request has had its turn: it has a place, or never will."""
        try:
            self._check_open()
            pools, barred, *_ = one.key
            lease = self._look(one.asked, pools, barred)
        except RequestError as e:
            one.turn.set_exception(e.with_traceback(None))  # which would hold this frame
            return True
        if lease is not None:
            one.turn.set_result(lease)
        return lease is not None

    def _look(self, asked: Relayed, pools: Pools, barred: Collection[str]) -> UpstreamLease | None:
        """A place in the first of the pools that has one, at one that fails only if nobody else is
        there, and last at one that is barred; None: all are busy or down. Raises UnknownModel for a
        model that nobody serves, once it is known, and KeeperGone if the only one that can answer
        was removed."""
        model, served = asked.outline.model or "", False
        never = self._never(asked)
        rather_not = {*barred, *never}
        passes = [(rather_not, False), (rather_not, True)]
        if barred:
            passes.append((never, True))
        for kept_out, broken in passes:
            full = False
            for each in pools:
                found = self._upstreams.choose(each, model, asked.ask, kept_out, broken)
                if found.lease is not None:
                    return found.lease
                served |= found.known
                full |= found.full
            if full:  # rather wait for who is sound
                return None
        if not served:
            self._check_known(model, pools)
        return None

    def _never(self, asked: Relayed) -> set[str]:
        """Upstreams that cannot answer a request, whatever becomes of the others. Raises
        KeeperGone."""
        if asked.keeper:
            if (keeper := self._upstreams.get(asked.keeper)) is None:
                raise KeeperGone(asked.keeper)
            return {up.id for up in self._upstreams if up is not keeper}
        return {up.id for up in self._upstreams if not up.own} if asked.begun else set()

    def _check_known(self, model: str, pools: Pools) -> None:
        """Raises UnknownModel if all who might serve a model have said what they do."""
        states = {up.state for up in self._upstreams if up.place.pool in pools}
        if not states and not any(self.known(pool) for pool in pools):
            states = {up.state for up in self._upstreams}  # nobody can be in these
        if "up" in states and "starting" not in states:
            names = sorted({name for up in self._up(pools) for name in up.models})
            raise UnknownModel(model, names, pools[0] if model in self._upstreams.models else "")

    def spare(self, asked: Relayed, pools: Pools, barred: Collection[str]) -> UpstreamLease | None:
        """An upstream of the first pool beside those that are barred, if one is free and nobody
        waits."""
        if self.waiting or asked.keeper:
            return None
        ask = msgspec.structs.replace(asked.ask, session="")  # which stays where it is
        return self._upstreams.choose(pools[0], asked.outline.model or "", ask, barred).lease

    async def place(
        self, asked: Relayed, pools: Pools, barred: Collection[str] = (), due: float | None = None
    ) -> UpstreamLease:
        """An upstream for a request, as soon as there is one. barred: rather others than these.
        due: when its client wants it no more (`time.monotonic`).

        Raises UnknownModel, KeeperGone, NoUpstream if it would wait too long, DeadlineExceeded if
        for its client, and Overloaded at the end.
        """
        self._check_open()
        if due is not None and time.monotonic() >= due:
            raise DeadlineExceeded
        waits = key_of_line(asked, pools, barred) in self._lines
        if not waits and (lease := self._look(asked, pools, barred)) is not None:
            return lease
        one = self._lines.join(asked, pools, barred)
        self._answers.waits(True)
        if self.waiting > self.limits.requests:
            self._refuse(self._lines.last)
        try:
            left = math.inf if due is None else max(0.0, due - time.monotonic())
            await asyncio.wait((one.turn,), timeout=min(left, self.limits.seconds))
            if one.turn.done():
                return one.turn.result()
            self._leave(one)
            raise DeadlineExceeded if left < self.limits.seconds else self._in_vain(asked, pools)
        except asyncio.CancelledError:
            if not one.turn.done():
                self._leave(one)
            elif one.turn.exception() is None:
                one.turn.result().end()  # its turn came as it left
            raise
        finally:
            del one  # its error holds this frame

    def _refuse(self, one: Waiter) -> None:
        """The line is too long for its last."""
        self._leave(one)
        text = f"{self.waiting:,} requests wait already, all before this one"
        one.turn.set_exception(NoUpstream(text, "overloaded", self.retry_after))

    def _leave(self, one: Waiter) -> None:
        self._lines.leave(one)
        self._answers.waits(bool(self._lines))

    def _in_vain(self, asked: Relayed, pools: Pools) -> NoUpstream:
        """What a request is told that has waited too long."""
        seconds = self.limits.seconds
        if self.candidates(asked, pools):
            text = f"every upstream was busy for {seconds:g} s"
            return NoUpstream(text, "overloaded", self.retry_after)
        return NoUpstream(f"no upstream answered for {seconds:g} s", "no_upstream", 2.0)
