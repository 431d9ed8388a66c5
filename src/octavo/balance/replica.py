"""What is known of a replica, and of all replicas as a table of numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

State = Literal["up", "full", "draining", "down"]
STATES: tuple[State, ...] = get_args(State)
STATE, REQUESTS, DRAIN, PROMPT_TOKEN, STEP, IMAGE = range(6)  # rows of a fleet's table
FEW = 8  # replicas that take less time one by one than as columns of a table
Positions = Sequence[int] | NDArray[np.int64]  # of replicas in a fleet, in order


class ReplicaTimes(msgspec.Struct, frozen=True):
    """Seconds of a prompt's token, of a step that gives each running text a token, and of an image;
    0 before they are measured."""

    prompt_token: float = 0.0
    step: float = 0.0
    image: float = 0.0

    @classmethod
    def of(cls, stats: Mapping[str, int]) -> ReplicaTimes:
        """As an engine's counts say."""
        image = stats.get("image_us", 0) / 1e6 / max(stats.get("images_encoded", 0), 1)
        return cls(stats.get("prompt_token_ns", 0) / 1e9, stats.get("step_us", 0) / 1e6, image)


class Replica(msgspec.Struct, frozen=True):
    """A replica as it is now.

    running: requests that have their first token; waiting: those that have none yet, with so many
    tokens of prompts to compute. places: requests that are computed together. prompt_token, step,
    image: seconds of a prompt's token, of a token of each text with one text more, and of an image,
    0 before they are measured. reply: tokens that a reply has. A draining replica finishes what it
    has; a full one takes requests again once one of its own has ended.
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
    """Replicas in the order of their ids. A decision among thousands is a few operations on whole
    rows of `table`, which has a column of numbers for each.

    generation: goes up when a replica comes or leaves.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, Replica] = {}
        self.ids: list[str] = []
        self._table: NDArray[np.float64] = np.empty((6, 0))
        self._stale: set[str] = set()  # whose columns are written when the table is read
        self.generation = 0

    def __len__(self) -> int:
        return len(self._replicas)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __getitem__(self, replica: str) -> Replica:
        return self._replicas[replica]

    def __contains__(self, replica: str) -> bool:
        return replica in self._replicas

    def at(self, position: int) -> Replica:
        """The replica at a position in `ids`."""
        return self._replicas[self.ids[position]]

    @property
    def table(self) -> NDArray[np.float64]:
        """The numbers of all, until the next `put` or `remove`."""
        for name in self._stale:
            one = self._replicas[name]
            self._table[:, self._position(name)] = (
                STATES.index(one.state), one.requests, one.drain, one.prompt_token, one.step,
                one.image,
            )  # fmt: skip
        self._stale.clear()
        return self._table

    def those(self, state: State, barred: Collection[str] = ()) -> Positions:
        """Where those are who are in a state and not barred."""
        if len(self) <= FEW:
            known = self._replicas
            return [
                position for position, name in enumerate(self.ids)
                if known[name].state == state and name not in barred
            ]  # fmt: skip
        found = self.table[STATE] == STATES.index(state)
        found[[self._position(name) for name in barred if name in self._replicas]] = False
        return np.flatnonzero(found)

    def put(self, replica: Replica) -> None:
        """Adds a replica, or replaces what was known of it."""
        if replica.id not in self._replicas:
            position = self._position(replica.id)
            self.ids.insert(position, replica.id)
            self._table = np.insert(self._table, position, 0.0, axis=1)
            self.generation += 1
        self._replicas[replica.id] = replica
        self._stale.add(replica.id)

    def remove(self, replica: str) -> None:
        """Forgets a replica, if it was known."""
        if self._replicas.pop(replica, None) is not None:
            position = self._position(replica)
            del self.ids[position]
            self._table = np.delete(self._table, position, axis=1)
            self._stale.discard(replica)
            self.generation += 1

    def _position(self, replica: str) -> int:
        return bisect_left(self.ids, replica)
