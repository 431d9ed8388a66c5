"""Keeps requests from a replica that fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

BreakerState = Literal["closed", "open", "half-open"]


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a breaker opens: a share `ratio` of failures, with at least `volume` results, or
    `consecutive` of them. Results count half as much every `half_life` seconds. open_seconds: until
    one request tries again, twice as long each time that fails, `most_seconds` at most."""

    ratio: float = 0.5
    volume: float = 10
    consecutive: int = 5
    half_life: float = 10.0
    open_seconds: float = 1.0
    most_seconds: float = 30.0


class Breaker:
    """The breaker of one replica.

    Failures are what says that the replica cannot serve: no connection, no first token in time, a
    stream that breaks off, 5xx. A client that leaves, or 4xx, is no result.
    """

    def __init__(
        self, clock: Callable[[], float], limits: BreakerLimits | None = None
    ) -> None:  # fmt: skip
        self._clock = clock
        self._limits = limits or BreakerLimits()
        self._failures = self._volume = 0.0  # of late, as of `_at`
        self._at = clock()
        self._row = 0  # failures without a success between
        self._opened: float | None = None
        self._openings = 0  # without a success between
        self._probing = False

    @property
    def state(self) -> BreakerState:
        if self._opened is None:
            return "closed"
        return "half-open" if self._clock() >= self._opened + self._pause else "open"

    @property
    def available(self) -> bool:
        """Whether a request may be sent."""
        return self.state == "closed" or (self.state == "half-open" and not self._probing)

    @property
    def ratio(self) -> float:
        """The share of failures of late."""
        self._decay()
        return self._failures / self._volume if self._volume else 0.0

    @property
    def _pause(self) -> float:
        limits = self._limits
        return min(limits.most_seconds, limits.open_seconds * 2.0 ** min(self._openings - 1, 32))

    def begin(self) -> bool:
        """A request is sent: whether it is the probe, the first while the breaker is half open. How
        it ends must be told, and that it was the probe."""
        probe = self._opened is not None and self.available
        self._probing |= probe
        return probe

    def succeeded(self, probe: bool = False) -> None:
        """The replica has served a request; a breaker whose probe it was is closed."""
        if self._opened is not None:
            if not probe:
                return  # of a request from before
            self._failures = self._volume = 0.0
        self._count(0)
        self._row = self._openings = 0
        self._opened, self._probing = None, False

    def failed(self, probe: bool = False) -> None:
        """The replica has failed a request; a breaker whose probe it was opens for longer."""
        self._count(1)
        self._row += 1
        limits = self._limits
        if self._opened is not None:
            if probe:
                self._open()
        elif self._row >= limits.consecutive or (
            self._volume >= limits.volume and self.ratio >= limits.ratio
        ):
            self._open()

    def cancelled(self, probe: bool = False) -> None:
        """A request has ended without a result; the next may be the probe if it was."""
        if probe:
            self._probing = False

    def _open(self) -> None:
        self._opened, self._probing = self._clock(), False
        self._openings += 1

    def _count(self, failures: int) -> None:
        self._decay()
        self._volume += 1
        self._failures += failures

    def _decay(self) -> None:
        now = self._clock()
        factor = math.exp2(-(now - self._at) / self._limits.half_life)
        self._failures, self._volume, self._at = self._failures * factor, self._volume * factor, now
