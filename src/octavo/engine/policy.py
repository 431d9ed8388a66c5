"""In which order sequences are scheduled."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Protocol

from octavo.engine.sequence import Sequence

PROMPT, GENERATED = (
    1,
    4,
)  # what a token costs: a step of decoding computes few, one of a prompt many
REMEMBERED = 1024  # tenants whose work is kept while they have no sequence


class SchedulingPolicy(Protocol):
    """Orders sequences. What each computes does not depend on it, only when."""

    def key(self, sequence: Sequence) -> Any:
        """A sort key: the lowest runs first, the highest is preempted first. Keys are comparable
        and no two are equal. They may change from step to step."""
        ...

    def arrived(self, sequence: Sequence) -> None:
        """A sequence has come, to wait or to run."""
        ...

    def left(self, sequence: Sequence) -> None:
        """A sequence that has come is gone."""
        ...

    def planned(self, sequence: Sequence, tokens: int) -> None:
        """A step computes so many tokens of a sequence."""
        ...

    def encoded(self, sequence: Sequence, rows: int) -> None:
        """An image of a sequence is encoded, which has so many rows."""
        ...

    def gives_way(self, running: list[Sequence], sequence: Sequence) -> Sequence | None:
        """The running sequence that is preempted for a waiting one where there is room for no
        other, if any is."""
        ...


class FairPolicy:
    """Lowest `priority` first; among equals the tenant that had the least work; of one tenant the
    earliest deadline, then first come, first served.

    Work is counted in virtual time: a tenant that comes back starts no lower than those that were
    there, so that it cannot save up. Of tenants that always have something to do, none is ahead of
    another by more than the work of one request, plus that of a step. A tenant that runs fewer
    sequences than its equal share takes the place of one that runs more.
    """

    def __init__(self) -> None:
        self.work: dict[str, int] = {}  # virtual time by tenant
        self._present: Counter[str] = Counter()  # sequences by tenant
        self._floor = 0  # the least work of those present

    def key(self, sequence: Sequence) -> tuple[int, int, float, int]:
        deadline = math.inf if sequence.deadline is None else sequence.deadline
        request = sequence.request
        return (request.priority, self.work.get(request.tenant, 0), deadline, sequence.arrival)

    def arrived(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        if not self._present[tenant]:
            level = self._least() - 1  # whoever comes is before those it is level with
            self.work[tenant] = max(self.work.get(tenant, 0), level)
        self._present[tenant] += 1

    def _least(self) -> int:
        self._floor = max(
            self._floor, min((self.work[t] for t in self._present), default=self._floor)
        )
        return self._floor

    def left(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        self._least()
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]
            if not self._present:  # nobody is owed anything
                self._floor = max(self._floor, self.work[tenant])
            if len(self.work) > REMEMBERED:
                behind = [t for t, w in self.work.items() if w <= self._floor]
                for each in set(behind) - self._present.keys():
                    del self.work[each]

    def planned(self, sequence: Sequence, tokens: int) -> None:
        own = len(sequence.request.prompt) - sequence.kv.computed  # of the prompt
        prompt = max(0, min(own, tokens))
        self.work[sequence.request.tenant] += PROMPT * prompt + GENERATED * (tokens - prompt)

    def encoded(self, sequence: Sequence, rows: int) -> None:
        self.work[sequence.request.tenant] += PROMPT * rows

    def gives_way(self, running: list[Sequence], sequence: Sequence) -> Sequence | None:
        counts = Counter(s.request.tenant for s in running)
        own, most = counts[sequence.request.tenant], max(counts.values())
        share = max(1, len(running) // len(self._present))  # one, of more tenants than places
        if own >= share or most <= own + 1:
            return None
        others = [
            s for s in running
            if counts[s.request.tenant] == most and s.request.priority >= sequence.request.priority
        ]  # fmt: skip
        return max(others, key=self.key, default=None)
