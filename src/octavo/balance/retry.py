"""Whether and when a request is sent again after it has failed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds before tries: any up to `first`, then twice as much each time, `most` at most. Who
    wants to be asked later than `patience` seconds from now is not asked again."""

    first: float = 1.0
    most: float = 4.0
    tries: int = 3
    patience: float = 30.0

    def delay(self, tried: int, draw: float, retry_after: float | None = None) -> float | None:
        """Seconds before the next try after `tried` have failed; None: there is none.

        draw: a random number from 0 to 1, so that clients do not come back together. retry_after:
        what the replica has asked for, which is kept to.
        """
        if not 0 < tried <= self.tries:
            return None
        if retry_after is not None and not retry_after <= self.patience:
            return None
        jitter = draw * min(self.most, self.first * 2.0 ** (tried - 1))
        return jitter if retry_after is None else max(jitter, retry_after)


class RetryBudget:
    """Lets retries be a `share` of the requests of late, so that they cannot keep a pool down.

    Requests count half as much every `half_life` seconds. least: retries that are always there.
    """

    def __init__(
        self, clock: Callable[[], float], share: float = 0.1, half_life: float = 10.0,
        least: float = 3.0,
    ) -> None:  # fmt: skip
        self._clock, self._share, self._half_life, self._least = clock, share, half_life, least
        self._requests = self._retries = 0.0  # of late, as of `_at`
        self._at = clock()

    def request(self) -> None:
        """A request has come."""
        self._decay()
        self._requests += 1

    @property
    def left(self) -> float:
        """Retries that may be made now."""
        self._decay()
        return max(self._least, self._share * self._requests) - self._retries

    def retry(self) -> bool:
        """Takes a retry from the budget, if there is one."""
        if self.left < 1:
            return False
        self._retries += 1
        return True

    def _decay(self) -> None:
        now = self._clock()
        factor = math.exp2(-(now - self._at) / self._half_life)
        self._requests, self._retries, self._at = (
            self._requests * factor, self._retries * factor, now,
        )  # fmt: skip
