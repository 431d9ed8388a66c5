"""In which order sequences are scheduled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from octavo.engine.sequence import Sequence

PROMPT, GENERATED = 1, 4  # what a token costs: a step of texts computes few, one of a prompt many
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

    def owed(self, sequence: Sequence, other: Sequence) -> bool:
        """Whether what a sequence wants now comes before what another does, though that runs."""
        ...

    def gives_way(
        self, running: list[Sequence], sequence: Sequence, held: Callable[[Sequence], int],
        wanted: int,
    ) -> Sequence | None:  # fmt: skip
        """The running sequence that is preempted for a waiting one where there is no room for it,
        if any is. held: what each has of what is short; wanted: by the one that waits."""
        ...


def service_class(priority: int) -> int:
    """P0, P1 or P2: priorities below, at and above 0. Higher classes take the places of lower."""
    return (priority > 0) - (priority < 0) + 1


class FairPolicy:
    """Lowest `priority` first; among equals the tenant that had the least work; of one tenant what
    is due first, then first come, first served.

    Work is counted in virtual time: a tenant that comes back starts no lower than those that were
    there, so that it cannot save up. Of tenants that always have something to do, none is ahead of
    another by more than the work of one request, plus that of a step. Where places or blocks are
    short, a tenant that has less than its equal share takes those of one that has more, and a class
    those of the classes below it.
    """

    def __init__(self) -> None:
        self.work: dict[str, int] = {}  # virtual time by tenant
        self._present: Counter[str] = Counter()  # sequences by tenant
        self._floor = 0  # the least work of those present

    def key(self, sequence: Sequence) -> tuple[int, int, float, int]:
        request = sequence.request
        return (request.priority, self.work.get(request.tenant, 0), sequence.due, sequence.arrival)

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

    def owed(self, sequence: Sequence, other: Sequence) -> bool:
        one, two = sequence.request, other.request
        apart = one.tenant != two.tenant or _class(sequence) != _class(other)
        return apart and self.key(sequence)[:2] < self.key(other)[:2]

    def gives_way(
        self, running: list[Sequence], sequence: Sequence, held: Callable[[Sequence], int],
        wanted: int,
    ) -> Sequence | None:  # fmt: skip
        if lower := [s for s in running if _class(s) > _class(sequence)]:
            return max(lower, key=self.key)
        amounts = Counter[str]()
        for each in running:
            amounts[each.request.tenant] += held(each)
        own, most = amounts[sequence.request.tenant], max(amounts.values())
        share = max(1, amounts.total() // len(self._present))  # one, of more tenants than places
        if own + wanted > share or most <= own + wanted:
            return None
        others = [
            s for s in running
            if amounts[s.request.tenant] == most and s.request.priority >= sequence.request.priority
        ]  # fmt: skip
        return max(others, key=self.key, default=None)


def _class(sequence: Sequence) -> int:
    return service_class(sequence.request.priority)
