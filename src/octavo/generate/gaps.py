"""Times between the tokens of a request, in little memory however long it is."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)  # seconds
MOST = 128  # moments that are kept


class Gaps:
    """counts: gaps up to each of BOUNDS, and above. longest: the longest, which ended at `at`.
    moments: of every `every`th token."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = self.longest = self.at = 0.0
        self.moments: list[float] = []
        self.every = 1
        self._seen = 0

    def token(self, now: float, before: float) -> None:
        """Takes a token of a choice, whose last came at `before` (0.0: it is the first)."""
        if self._seen % self.every == 0:
            self.moments.append(now)
            if len(self.moments) == MOST:
                del self.moments[1::2]
                self.every *= 2
        self._seen += 1
        if not before:
            return
        gap = max(now - before, 0.0)
        self.counts[bisect_left(BOUNDS, gap)] += 1
        self.total += gap
        if gap > self.longest:
            self.longest, self.at = gap, now
