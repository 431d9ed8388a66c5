"""How long a first byte is waited for before a second replica is asked as well."""

from __future__ import annotations

from collections import deque
from typing import Literal

Wait = float | Literal["p95"]
KEPT = 256  # waits that are remembered of each kind of request
LEAST = 20  # of them that tell what is usual
SHARE = 0.95


class Hedges:
    """wait: seconds, or `p95`: as long as 95 % of requests of that kind waited of late; None: no
    second replica is asked."""

    def __init__(self, wait: Wait | None = None) -> None:
        self.wait = wait
        self._seen: dict[tuple[str, bool], deque[float]] = {}

    def seen(self, model: str, stream: bool, seconds: float) -> None:
        """A first byte has come after so long."""
        self._seen.setdefault((model, stream), deque(maxlen=KEPT)).append(seconds)

    def seconds(self, model: str, stream: bool) -> float | None:
        """Seconds until a second replica is asked; None: it is not."""
        if self.wait != "p95":
            return self.wait
        seen = sorted(self._seen.get((model, stream), ()))
        return seen[int(SHARE * len(seen))] if len(seen) >= LEAST else None
