"""What a key may use per minute, per day and at once; counted in tokens that were computed.

A request reserves the tokens that it may take, and gives back at its end what it did not. One that
names no number of tokens gets them by the chunk; where the next is refused, its text ends.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from octavo.errors import RequestError
from octavo.server.keys import Key, today

MINUTE = 60.0
CHUNK = 64  # tokens that a text without a limit gets at a time
GRAIN = 0.1  # seconds that are counted as one moment
Clock = Callable[[], float]


RATE_HEADERS = tuple(
    f"x-ratelimit-{name}-{what}"
    for what in ("requests", "tokens")
    for name in ("limit", "remaining", "reset")
)


class RateLimited(RequestError):
    """A key has used what it may; `retry_after` seconds from now it may use this."""

    status = 429

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message, None, "rate_limit_exceeded")
        self.retry_after = retry_after


class RateWindow:
    """Amounts of the last minute, which together stay within a limit in every minute there is."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._spent: deque[tuple[float, int]] = deque()  # when, how much
        self._sum = 0

    def _now(self) -> float:
        now = self._clock()
        while self._spent and self._spent[0][0] + MINUTE <= now:
            self._sum -= self._spent.popleft()[1]
        return now

    @property
    def used(self) -> int:
        self._now()
        return self._sum

    def add(self, amount: int) -> None:
        self._now()
        moment = math.ceil(self._clock() / GRAIN) * GRAIN  # not before it was used
        if amount and self._spent and self._spent[-1][0] >= moment:
            amount_then = self._spent.pop()[1]
            self._spent.append((moment, amount_then + amount))
        elif amount:
            self._spent.append((moment, amount))
        self._sum += amount

    def wait(self, excess: int) -> float:
        """Seconds until so much of what was used is a minute ago; infinity if it never was used."""
        now = self._now()
        for when, amount in self._spent:
            excess -= amount
            if excess <= 0:
                return when + MINUTE - now
        return 0.0 if excess <= 0 else math.inf


def out_of(limit: int, what: str, period: str) -> str:
    """What a key is told that has used all it may."""
    return f"the limit of {limit:,} {what} a {period} is reached"


@dataclass(eq=False)
class Meter:
    """The tokens of one request: how many are reserved.

    more: is told of those that are reserved while it runs; refused: there are no more. settled: is
    told at the end how many were used.
    """

    account: Account
    reserved: int
    more: Callable[[int], None] | None = None
    settled: Callable[[int], None] | None = None
    refused: bool = False

    def covers(self, used: int) -> bool:
        """Whether the request may go on after so many tokens."""
        if used < self.reserved:
            return True
        granted = 0 if self.refused else self.account.room(CHUNK)
        self.account.held += granted
        self.reserved += granted
        if granted and self.more is not None:
            self.more(granted)
        return used < self.reserved

    def shrink(self, reserved: int) -> None:
        """No more than so many tokens are reserved."""
        self.account.held -= self.reserved - reserved
        self.reserved = reserved

    def settle(self, used: int) -> None:
        """The request has ended with so many tokens computed."""
        self.shrink(0)
        self.account.spend(used)
        if self.settled is not None:
            self.settled(used)


class Shared(Protocol):
    """What several servers count together. late: seconds that count beyond a minute."""

    late: float

    async def begin(self, account: Account) -> None:
        """Counts a request. Raises RateLimited."""
        ...

    async def reserve(self, account: Account, meter: Meter, least: int) -> None:
        """Counts what a meter has reserved, at least so many tokens. Raises RateLimited."""
        ...

    async def close(self) -> None:
        """Ends it, once all is counted."""
        ...


class Account:
    """What one key uses. day_used: tokens of today before now. shared: counts it with others."""

    def __init__(
        self, key: Key, day_used: int = 0, clock: Clock = time.monotonic,
        shared: Shared | None = None,
    ) -> None:  # fmt: skip
        self.key = key
        self._shared = shared
        self.running = 0
        self.held = 0  # tokens that running requests have reserved
        self._requests, self._tokens = RateWindow(clock), RateWindow(clock)
        self._day, self._day_used = today(), day_used

    def begin(self) -> None:
        """A request begins. Raises RateLimited."""
        limits = self.key.limits
        if limits.concurrent is not None and self.running >= limits.concurrent:
            raise RateLimited(f"{self.running} requests are running, which is the limit", 1.0)
        if limits.requests_per_minute is not None:
            over = self._requests.used + 1 - limits.requests_per_minute
            self._refuse("requests", self._requests, limits.requests_per_minute, over)
        self._requests.add(1)
        self.running += 1

    async def enter(self) -> None:
        """A request begins, and is counted wherever it has to be. Raises RateLimited."""
        self.begin()
        if self._shared is not None:
            try:
                await self._shared.begin(self)
            except BaseException:
                self._requests.add(-1)
                self.end()
                raise

    async def take(self, prompt: int, completion: int | None, first: int = CHUNK) -> Meter:
        """Reserves the tokens of a request wherever they are counted. Raises RateLimited."""
        meter = self.reserve(prompt, completion, first)
        if self._shared is not None:
            least = prompt + (1 if completion is None else completion)
            try:
                await self._shared.reserve(self, meter, least)
            except BaseException:
                meter.shrink(0)
                raise
        return meter

    def end(self) -> None:
        """A request that has begun ends."""
        self.running -= 1

    def _refuse(self, what: str, window: RateWindow, limit: int, over: int) -> None:
        if over > 0:
            late = 0.0 if self._shared is None else self._shared.late
            wait = min(window.wait(over), MINUTE) + late
            raise RateLimited(out_of(limit, what, "minute"), wait)

    def reserve(self, prompt: int, completion: int | None, first: int = CHUNK) -> Meter:
        """Reserves the tokens of a request, or all there are if it may take more than the limit.
        first: of a text without a limit.

        Raises RateLimited if they are not there now.
        """
        limits = self.key.limits
        wanted = prompt + (first if completion is None else completion)
        least = prompt + (1 if completion is None else completion)
        if limits.tokens_per_minute is not None:
            limit = limits.tokens_per_minute
            over = self._tokens.used + self.held + min(least, limit) - limit
            self._refuse("tokens", self._tokens, limit, over)
        if limits.tokens_per_day is not None and self.room(1) == 0:
            left = 86_400 - time.time() % 86_400
            raise RateLimited(out_of(limits.tokens_per_day, "tokens", "day"), left)
        meter = Meter(self, self.room(wanted))
        self.held += meter.reserved
        return meter

    @property
    def counts_tokens(self) -> bool:
        """Whether the key has a limit of tokens."""
        limits = self.key.limits
        return (limits.tokens_per_minute, limits.tokens_per_day) != (None, None)

    def share(self, prompt: int) -> int:
        """Tokens for a text without a limit that cannot be given more later: half of what its
        prompt leaves, so that others may run beside it, or all if no other may."""
        left = max(1, self.room(sys.maxsize) - prompt)
        return left if self.running == self.key.limits.concurrent else -(-left // 2)

    def room(self, wanted: int) -> int:
        """Of so many tokens, those that the limits leave."""
        limits = self.key.limits
        if limits.tokens_per_minute is not None:
            wanted = min(wanted, limits.tokens_per_minute - self._tokens.used - self.held)
        if limits.tokens_per_day is not None:
            wanted = min(wanted, limits.tokens_per_day - self._today() - self.held)
        return max(0, wanted)

    def spend(self, tokens: int) -> None:
        """Counts tokens that were computed."""
        self._tokens.add(tokens)
        self._day_used = self._today() + tokens

    def _today(self) -> int:
        if self._day != today():
            self._day, self._day_used = today(), 0
        return self._day_used

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What is left, as OpenAI's API says it."""
        found = []
        limits = self.key.limits
        for what, limit, window, held in (
            ("requests", limits.requests_per_minute, self._requests, 0),
            ("tokens", limits.tokens_per_minute, self._tokens, self.held),
        ):
            if limit is not None:
                left = max(0, limit - window.used - held)
                reset = window.wait(window.used) if window.used else 0.0
                for name, value in (("limit", f"{limit}"), ("remaining", f"{left}"),
                                    ("reset", f"{reset:.3f}s")):  # fmt: skip
                    found.append((f"x-ratelimit-{name}-{what}".encode(), value.encode()))
        return found
