"""In which order sequences are scheduled."""

from __future__ import annotations

import math
from typing import Any, Protocol

from octavo.engine.sequence import Sequence


class SchedulingPolicy(Protocol):
    """Orders sequences. What each computes does not depend on it, only when."""

    def key(self, sequence: Sequence) -> Any:
        """A sort key: the lowest runs first, the highest is preempted first. Keys are comparable
        and no two are equal."""
        ...


class PriorityPolicy:
    """Lowest `priority` first, then the earliest deadline, then first come, first served."""

    def key(self, sequence: Sequence) -> tuple[int, float, int]:
        deadline = math.inf if sequence.deadline is None else sequence.deadline
        return (sequence.request.priority, deadline, sequence.arrival)
