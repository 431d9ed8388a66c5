"""Routes requests: replicas, what they hold, a policy, and sessions that stay where they are."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from hashlib import blake2b

import msgspec

from octavo.balance.cost import Ask, Cost, cost
from octavo.balance.policies import POLICIES, Policy
from octavo.balance.prefix_index import ReplicaMatch, ReplicaPrefixes
from octavo.balance.replica import Fleet, Replica, State

MOST_SESSIONS = 1 << 16
MOST_IMAGES = 256  # of a replica: those that it was sent last
SESSION_SECONDS = 1800.0


class Sessions:
    """Where sessions were last. ttl: seconds after which one that was not used is forgotten.
    Clients call them what they like, so that a digest is kept of that."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, limit: int = MOST_SESSIONS,
        ttl: float = SESSION_SECONDS,
    ) -> None:  # fmt: skip
        self._clock, self._limit, self._ttl = clock, limit, ttl
        self._places: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # used last comes last

    def __len__(self) -> int:
        return len(self._places)

    def get(self, session: str) -> str:
        """The replica of a session, "" for none."""
        self._expire()
        return self._places.get(_digest(session), ("", 0.0))[0]

    def put(self, session: str, replica: str) -> None:
        """A session is at a replica now."""
        name = _digest(session)
        self._places.pop(name, None)
        self._places[name] = replica, self._clock()
        self._expire()

    def _expire(self) -> None:
        since = self._clock() - self._ttl
        while self._places:
            name, (_, used) = next(iter(self._places.items()))
            if used > since and len(self._places) <= self._limit:
                return
            del self._places[name]


def _digest(session: str) -> bytes:
    return blake2b(session.encode(), digest_size=16).digest()


class RoutingDecision(msgspec.Struct, frozen=True):
    """Where a request goes, and why: the name of the policy, or "session"."""

    replica: str
    why: str
    cost: Cost


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as it looks for a request."""

    replica: str
    state: State
    barred: bool
    requests: int
    cost: Cost


class Router:
    """Chooses replicas. policy: a name of `POLICIES`, or one; index: of the blocks they hold.
    images: of those that they were sent, and have encoded."""

    def __init__(
        self, policy: str | Policy = "cost", index: ReplicaPrefixes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._name = policy if isinstance(policy, str) else type(policy).__name__
        self._policy = POLICIES[policy]() if isinstance(policy, str) else policy
        self.index = ReplicaPrefixes() if index is None else index
        self.images = ReplicaPrefixes(MOST_IMAGES)
        self.fleet = Fleet()
        self.sessions = Sessions(clock)

    def choose(self, ask: Ask, barred: Collection[str] = ()) -> RoutingDecision | None:
        """The replica for a request, of those that are up and not barred; None: there is none. A
        session comes back to its own if that only has no place now, or is not for this request."""
        match = self._match(ask)
        home = name = self.sessions.get(ask.session) if ask.session else ""
        state, why = self.fleet[home].state if home in self.fleet else "down", "session"
        if state != "up" or home in barred:
            able = self.fleet.those("up", barred)
            if not len(able):
                return None
            position = self._policy.choose(self.fleet, ask, match, able)
            name, why = self.fleet.ids[position], self._name
        if ask.session:
            self.sessions.put(ask.session, home if state in ("up", "full") else name)
        return RoutingDecision(name, why, self._cost(self.fleet[name], ask, match))

    def _match(self, ask: Ask) -> ReplicaMatch:
        match = self.index.match(ask.blocks)
        if not ask.images:
            return match
        return replace(match, images=tuple(self.images.match((key,)) for key in ask.images))

    @staticmethod
    def _cost(replica: Replica, ask: Ask, match: ReplicaMatch) -> Cost:
        return cost(replica, ask, match.blocks(replica.id), match.encoded(replica.id))

    def remove(self, replica: str) -> None:
        """Forgets a replica and what it holds."""
        self.fleet.remove(replica)
        self.empty(replica)

    def empty(self, replica: str) -> None:
        """A replica holds nothing any more."""
        self.index.remove_replica(replica)
        self.images.remove_replica(replica)

    def explain(self, ask: Ask, barred: Collection[str] = ()) -> list[Candidate]:
        """What the request costs at every replica, the least first."""
        match = self._match(ask)
        all_of = [
            Candidate(r.id, r.state, r.id in barred, r.requests, self._cost(r, ask, match))
            for r in self.fleet
        ]
        return sorted(all_of, key=lambda c: (c.cost.total, c.requests, c.replica))
