"""How fast requests are answered while others wait for a place."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

LATELY = 30.0  # seconds over which they are counted


class AnswerRate:
    """Counts what is answered of late, and the seconds that it takes. What is answered while nobody
    waits says how much is asked, not how much can be answered: that time counts for nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._at = clock, clock()
        self._waits = self._waited = False  # now, and since the last answer
        self._answered = self._seconds = 0.0  # the longer ago, the less they count

    def waits(self, somebody: bool) -> None:
        """Whether somebody waits from now on."""
        self._pass()
        self._waits = somebody
        self._waited = self._waited or somebody

    def answered(self) -> None:
        """A request has been answered, maybe after who waited last got its place."""
        self._pass()
        self._answered += self._waited
        self._waited = self._waits

    @property
    def rate(self) -> float:
        """Requests a second; 0.0 while nobody knows."""
        self._pass()
        return self._answered / self._seconds if self._seconds else 0.0

    def _pass(self) -> None:
        now = self._clock()
        if self._waits:
            kept = math.exp((self._at - now) / LATELY)
            self._answered *= kept
            self._seconds = LATELY - (LATELY - self._seconds) * kept
        self._at = now
