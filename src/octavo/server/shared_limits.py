"""Limits of keys that several servers share, counted in Valkey (or Redis, which speaks the same).

Amounts are added to the half second in which they are asked for, and taken back if the last minute
then holds too much: so servers that ask at the same moment never grant more than the limit.
Servers have to agree on the time to a fraction of a second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from octavo.errors import UsageError
from octavo.server.keys import DAY, Key, KeyLimits, today
from octavo.server.limits import MINUTE, Account, Meter, RateLimited, out_of

LOG = logging.getLogger("octavo.server")
GRAIN = 0.5  # seconds that are counted together
GRAINS = round(MINUTE / GRAIN) + 1  # whose amounts may be less than a minute old
AWAY = 5.0  # seconds without it after which the servers' own limits hold for a while
PATIENCE = 0.5  # seconds for an answer


class Grant(NamedTuple):
    """What was counted where, to be taken back: name of the count, and how much."""

    name: str
    amount: int


def open_valkey(url: str) -> Any:
    """A client of the server at `url` (valkey://, redis://, with s for TLS, or unix://).

    Raises UsageError.
    """
    try:
        from valkey.asyncio import Valkey
    except ImportError:
        raise UsageError("--limits-url needs a client", 'pip install "octavo[valkey]"') from None
    try:
        return Valkey.from_url(url, socket_timeout=PATIENCE, socket_connect_timeout=PATIENCE)
    except ValueError as e:
        raise UsageError(f"--limits-url: {e}", "--limits-url valkey://127.0.0.1:6379/0") from None


class SharedLimits:
    """What all servers count together. client: of Valkey; clock: seconds since 1970."""

    late = GRAIN

    def __init__(self, client: Any, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._clock = clock
        self._away_until = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, account: Account) -> None:
        """Counts a request. Raises RateLimited."""
        limit = account.key.limits.requests_per_minute
        if limit is not None:
            await self._minute(account.key.name, "requests", 1, 1, limit)

    async def reserve(self, account: Account, meter: Meter, least: int) -> None:
        """Counts the tokens that a request has reserved, at least so many. Raises RateLimited."""
        key = account.key
        least = min(least, meter.reserved)
        taken = await self._tokens(key.name, key.limits, meter.reserved, least)
        meter.shrink(min((g.amount for g in taken), default=meter.reserved))
        turn = asyncio.Lock()  # of a request: all is counted before what is left is taken back
        meter.more = lambda wanted: self._later(turn, self._more(key, meter, taken, wanted))
        meter.settled = lambda used: self._later(turn, self._settle(taken, used))

    async def _tokens(self, name: str, limits: KeyLimits, wanted: int, least: int) -> list[Grant]:
        taken = []
        if limits.tokens_per_minute is not None:
            limit = limits.tokens_per_minute
            taken += await self._minute(name, "tokens", wanted, min(least, limit), limit)
        if limits.tokens_per_day is not None:
            try:
                taken += await self._day(name, wanted, limits.tokens_per_day)
            except RateLimited:
                await self._settle(taken, 0)
                raise
        return taken

    async def _more(self, key: Key, meter: Meter, taken: list[Grant], wanted: int) -> None:
        """Counts a further part of a text, which goes on meanwhile; none may follow if it is less
        than was wanted."""
        try:
            taken += await self._tokens(key.name, key.limits, wanted, wanted)
        except RateLimited:
            meter.refused = True

    def _later(self, turn: asyncio.Lock, work: Coroutine[Any, Any, None]) -> None:
        async def in_turn() -> None:
            async with turn:
                await work

        task = asyncio.get_running_loop().create_task(in_turn())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _minute(
        self, name: str, what: str, wanted: int, least: int, limit: int
    ) -> list[Grant]:
        """Counts up to `wanted`, at least `least`, in the last minute. Raises RateLimited."""
        moment = int(self._clock() / GRAIN)
        counts = [f"octavo:{name}:{what}:{moment - age}" for age in range(GRAINS)]
        found = await self._count(counts, wanted)
        if found is None:
            return []
        over = sum(found) - limit
        grant = Grant(counts[0], min(wanted, wanted - over))
        if grant.amount >= least:
            await self._take_back(counts[0], wanted - grant.amount)
            return [grant]
        await self._take_back(counts[0], wanted)
        found[0] -= wanted
        excess, age = sum(found) + least - limit, GRAINS
        while excess > 0 and age > 0:
            age -= 1
            excess -= found[age]
        wait = (moment - age + GRAINS) * GRAIN - self._clock()
        raise RateLimited(out_of(limit, what, "minute"), max(GRAIN, wait))

    async def _day(self, name: str, wanted: int, limit: int) -> list[Grant]:
        """Counts up to `wanted`, at least one, of today."""
        count = f"octavo:{name}:day:{today()}"
        found = await self._count([count], wanted)
        if found is None:
            return []
        grant = Grant(count, min(wanted, wanted - (found[0] - limit)))
        if grant.amount > 0:
            await self._take_back(count, wanted - grant.amount)
            return [grant]
        await self._take_back(count, wanted)
        raise RateLimited(out_of(limit, "tokens", "day"), DAY - self._clock() % DAY)

    # -- the server -------------------------------------------------------------------------------

    async def _count(self, counts: list[str], amount: int) -> list[int] | None:
        """Adds to the first count; gives all. None while there is no server."""
        found = await self._add(counts, amount)
        return None if found is None else [int(n or 0) for n in found[-1]]

    async def _take_back(self, count: str, amount: int) -> None:
        if amount:
            await self._add([count], -amount)

    async def _add(self, counts: list[str], amount: int) -> list[Any] | None:
        seconds = 2 * (DAY if ":day:" in counts[0] else int(MINUTE))
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.incrby(counts[0], amount).expire(counts[0], seconds).mget(counts)
            found: list[Any] | None = await self._asked(pipe.execute)
            return found

    async def _settle(self, taken: list[Grant], used: int) -> None:
        """Takes back what a request was granted and has not used; counts what it used beyond."""
        for kind in ("tokens", "day"):
            left, grants = used, [g for g in taken if f":{kind}:" in g.name]
            for number, grant in enumerate(grants, 1):
                spent = left if number == len(grants) else min(left, grant.amount)
                left -= spent
                await self._take_back(grant.name, grant.amount - spent)

    async def _asked(self, ask: Callable[[], Any]) -> Any:
        """What Valkey answers; None while it is away, when the server's own limits hold."""
        from valkey.exceptions import ValkeyError

        if time.monotonic() < self._away_until:
            return None
        try:
            return await ask()
        except (ValkeyError, OSError, TimeoutError) as e:
            LOG.warning("limits are not shared for %g s: %s", AWAY, type(e).__name__)
            self._away_until = time.monotonic() + AWAY
            return None

    async def close(self) -> None:
        """Takes back what has not been used, and closes the connection."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()
