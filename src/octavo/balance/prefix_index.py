"""Which replicas hold which prefixes: exactly, as engines tell, or as what they were sent suggests.

Each block (`chain.py`) has a bitmap of the replicas that hold it, so a prompt is looked up in one
pass over its blocks however many replicas there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

MOST_BLOCKS = 1 << 18  # of a replica: four million tokens in blocks of 16


@dataclass(frozen=True, slots=True)
class ReplicaMatch:
    """The replicas that hold leading blocks of a prompt.

    levels: numbers of blocks with a bitmap of who holds that many at least, the most first.
    """

    levels: tuple[tuple[int, int], ...]
    slots: dict[str, int]
    names: list[str]

    def blocks(self, replica: str) -> int:
        """Leading blocks that a replica holds."""
        slot = self.slots.get(replica)
        if slot is not None:
            for blocks, holders in self.levels:
                if holders >> slot & 1:
                    return blocks
        return 0

    @staticmethod
    def count(holders: int) -> int:
        return holders.bit_count()

    def replicas(self, holders: int) -> Iterator[str]:
        """The replicas of a bitmap."""
        while holders:
            lowest = holders & -holders
            yield self.names[lowest.bit_length() - 1]
            holders ^= lowest


class ReplicaPrefixes:
    """Blocks as engines say that they store and remove them. limit: blocks of a replica, beyond
    which those stored longest ago are forgotten."""

    def __init__(self, limit: int = MOST_BLOCKS) -> None:
        self._limit = limit
        self._holders: dict[int, int] = {}  # bitmaps by block
        self._held: dict[str, OrderedDict[int, None]] = {}  # blocks by replica
        self._slots: dict[str, int] = {}
        self._names: list[str] = []  # by slot, "" where one is free

    def __len__(self) -> int:
        """Blocks that are known."""
        return len(self._holders)

    def held(self, replica: str) -> int:
        """Blocks that a replica holds."""
        return len(self._held.get(replica, ()))

    def stored(self, replica: str, blocks: Iterable[int]) -> None:
        """A replica holds these blocks from now on."""
        bit, held = 1 << self._slot(replica), self._held[replica]
        for block in blocks:
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = None
                self._holders[block] = self._holders.get(block, 0) | bit
        while len(held) > self._limit:
            self._drop(held.popitem(last=False)[0], bit)

    def removed(self, replica: str, blocks: Iterable[int]) -> None:
        """A replica does not hold these blocks any more."""
        held = self._held.get(replica)
        for block in blocks if held else ():
            if held and block in held:
                del held[block]
                self._drop(block, 1 << self._slots[replica])

    def remove_replica(self, replica: str) -> None:
        """A replica holds nothing any more."""
        if replica in self._slots:
            slot = self._slots.pop(replica)
            self._names[slot] = ""
            for block in self._held.pop(replica):
                self._drop(block, 1 << slot)

    def match(self, blocks: Sequence[int]) -> ReplicaMatch:
        """Who holds how many of these blocks without a gap."""
        levels: list[tuple[int, int]] = []
        holders = -1
        for i, block in enumerate(blocks):
            left = holders & self._holders.get(block, 0)
            if left != holders and i:
                levels.append((i, holders))
            holders = left
            if not holders:
                break
        else:
            if blocks:
                levels.append((len(blocks), holders))
        return ReplicaMatch(tuple(reversed(levels)), self._slots, self._names)

    def _slot(self, replica: str) -> int:
        if replica not in self._slots:
            if "" in self._names:
                slot = self._names.index("")
                self._names[slot] = replica
            else:
                slot = len(self._names)
                self._names.append(replica)
            self._slots[replica] = slot
            self._held[replica] = OrderedDict()
        return self._slots[replica]

    def _drop(self, block: int, bit: int) -> None:
        left = self._holders[block] & ~bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


class SentPrefixes(ReplicaPrefixes):
    """What replicas that say nothing may hold: the blocks that they were sent last, `limit` each.

    Caches forget the ends of prompts before their beginnings, and so does this.
    """

    def sent(self, replica: str, blocks: Sequence[int]) -> None:
        """A replica was sent a prompt of these blocks."""
        self.stored(replica, reversed(blocks))
