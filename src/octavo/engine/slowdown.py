"""Whether steps take longer than they did: each beside those of as many texts before it."""

from __future__ import annotations

import math

from octavo.engine.cost import NEWEST, OUTLIER

HALF = 3600.0  # seconds until half of what has become slower is usual
FASTER = 0.05  # weight of a step that is faster than usual; the most of one that is slower
ENOUGH = 20  # steps of so many texts, before one more is compared with them


class Slowdown:
    """times: what steps of so many texts usually take that they take now; 1 before that is known.

    A processor that is shared, hot or throttled shows in it; more requests at a time do not.
    """

    def __init__(self) -> None:
        self.times = 1.0
        self._usual: dict[int, tuple[float, int, float]] = {}  # seconds, count, when; by texts

    def record(self, texts: int, seconds: float, now: float) -> None:
        """Takes a step that ended now."""
        seconds = max(seconds, 1e-9)
        usual, count, when = self._usual.get(texts, (seconds, 0, now))
        if count >= ENOUGH:
            factor = min(seconds / usual, OUTLIER * self.times)
            self.times += NEWEST * (factor - self.times)
        slower = min(FASTER, 1 - math.exp2((when - now) / HALF))
        weight = FASTER if seconds < usual else slower
        self._usual[texts] = usual + weight * (seconds - usual), count + 1, now
