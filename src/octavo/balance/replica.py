"""What is known of a replica, and replicas in an order of load."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["up", "draining", "down"]
Order = Callable[["Replica"], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica as it is now.

    running: requests that have their first token; waiting: those that have none yet, with so many
    tokens of prompts to compute. places: requests that are computed together. prompt_token, step,
    image: seconds of a prompt's token, of a token of each text, and of an image, 0 before they are
    measured. reply: tokens that a reply has. A draining replica finishes what it has.
    """

    id: str
    state: State = "up"
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    places: int = 1 << 20
    prompt_token: float = 0.0
    step: float = 0.0
    image: float = 0.0
    reply: float = 128.0

    @property
    def requests(self) -> int:
        """In flight."""
        return self.running + self.waiting

    @property
    def drain(self) -> float:
        """Seconds until a prompt that comes now is begun: those before it are computed, and
        replies have ended where all places are taken."""
        prompts = self.waiting_tokens * self.prompt_token
        excess = self.requests + 1 - self.places
        if excess <= 0:
            return prompts
        return max(prompts, self.step * self.reply * excess / self.places)


class Fleet:
    """Replicas by id. Those that are up are kept in an order; of equal ones the first by id."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._replicas: dict[str, Replica] = {}
        self._keys: list[tuple[Any, ...]] = []  # each with its replica's id
        self._rates: list[float] = []  # of those that are up

    def __len__(self) -> int:
        return len(self._replicas)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __getitem__(self, replica: str) -> Replica:
        return self._replicas[replica]

    def __contains__(self, replica: str) -> bool:
        return replica in self._replicas

    @property
    def up(self) -> int:
        """Replicas that take requests."""
        return len(self._keys)

    @property
    def fastest(self) -> float:
        """The least seconds that any replica takes for a token of a prompt."""
        return self._rates[0] if self._rates else 0.0

    def put(self, replica: Replica) -> None:
        """Adds a replica, or replaces what was known of it."""
        self.remove(replica.id)
        self._replicas[replica.id] = replica
        if replica.state == "up":
            insort(self._keys, (*self._order(replica), replica.id))
            insort(self._rates, replica.prompt_token)

    def remove(self, replica: str) -> None:
        """Forgets a replica, if it was known."""
        old = self._replicas.pop(replica, None)
        if old is not None and old.state == "up":
            del self._keys[bisect_left(self._keys, (*self._order(old), replica))]
            del self._rates[bisect_left(self._rates, old.prompt_token)]

    def at(self, place: int) -> Replica:
        """The replica at a place of the order."""
        return self._replicas[self._keys[place][-1]]

    def place_after(self, key: tuple[Any, ...]) -> int:
        """The place of the first replica that comes after a key, 0 where none does."""
        place = bisect_left(self._keys, key)
        return place if place < len(self._keys) else 0

    def in_order(self, start: int = 0) -> Iterator[Replica]:
        """Replicas that are up, from a place of the order on, all around."""
        count = len(self._keys)
        for i in range(count):
            yield self.at((start + i) % count)
