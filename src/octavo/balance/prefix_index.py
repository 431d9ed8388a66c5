"""Which replicas hold which prefixes: exactly, as engines tell, or as what they were sent suggests.

Each block (`chain.py`) has a bitmap of the replicas that hold it. Blocks that came and went
together share one, so a prompt is looked up in one pass over its blocks however many replicas there
are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_BLOCKS = 1 << 18  # of a replica: four million tokens in blocks of 16


@dataclass(frozen=True, slots=True)
class ReplicaMatch:
    """The replicas that hold leading blocks of a prompt.

    levels: numbers of blocks with a bitmap of who holds that many at least, the most first. slots:
    of replicas in bitmaps; size: there are so many; generation: goes up when they change. images:
    who has encoded each of the prompt's images.
    """

    levels: tuple[tuple[int, int], ...]
    slots: dict[str, int]
    size: int
    generation: int
    images: tuple[ReplicaMatch, ...] = ()

    def encoded(self, replica: str) -> int:
        """Images that a replica has encoded."""
        return sum(image.blocks(replica) for image in self.images)

    def blocks(self, replica: str) -> int:
        """Leading blocks that a replica holds."""
        slot = self.slots.get(replica)
        if slot is not None:
            for blocks, holders in self.levels:
                if holders >> slot & 1:
                    return blocks
        return 0

    def spread(
        self, value: Callable[[int], float], slots: NDArray[np.int64]
    ) -> NDArray[np.float64] | float:
        """The value of the leading blocks that each of these slots holds; -1 is of a replica that
        holds none."""
        if not self.levels:
            return value(0)
        found, size = np.full(self.size + 1, value(0)), self.size // 8 + 1
        for blocks, holders in reversed(self.levels):
            bits = np.frombuffer(holders.to_bytes(size, "little"), np.uint8)
            held = np.unpackbits(bits, count=self.size + 1, bitorder="little")
            found[held.view(np.bool_)] = value(blocks)
        return found[slots]


class ReplicaPrefixes:
    """Blocks as engines say that they store and remove them, or for as long as prompts hold them.
    limit: blocks of a replica, beyond which those stored longest ago are forgotten, where `resize`
    has not said otherwise."""

    def __init__(self, limit: int = MOST_BLOCKS) -> None:
        self._limit = limit
        self._limits: dict[str, int] = {}  # of replicas that have one of their own
        self._holders: dict[int, int] = {}  # bitmaps by block
        # blocks by replica, each with how many prompts hold it; 1 if it is known otherwise
        self._held: dict[str, OrderedDict[int, int]] = {}
        self._slots: dict[str, int] = {}
        self._names: list[str] = []  # by slot, "" where one is free
        self._generation = 0

    def __len__(self) -> int:
        """Blocks that are known."""
        return len(self._holders)

    def held(self, replica: str) -> int:
        """Blocks that a replica holds."""
        return len(self._held.get(replica, ()))

    def stored(self, replica: str, blocks: Iterable[int]) -> None:
        """A replica holds these blocks from now on."""
        bit, held, new = 1 << self._slot(replica), self._held[replica], []
        for block in blocks:
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = 1
                new.append(block)
        self._toggle(new, bit)
        over = len(held) - self._limits.get(replica, self._limit)
        self._toggle([held.popitem(last=False)[0] for _ in range(over)], bit)

    def removed(self, replica: str, blocks: Iterable[int]) -> None:
        """A replica does not hold these blocks any more."""
        if held := self._held.get(replica):
            gone = [block for block in dict.fromkeys(blocks) if block in held]
            for block in gone:
                del held[block]
            self._toggle(gone, 1 << self._slots[replica])

    def sent(self, replica: str, blocks: Sequence[int]) -> None:
        """A replica that says nothing was sent a prompt of these blocks: it may hold them. Caches
        forget the ends of prompts before their beginnings, and so does this."""
        self.stored(replica, reversed(blocks))

    def hold(self, replica: str, blocks: Iterable[int]) -> None:
        """A replica holds these blocks of a prompt until that is to `release` them."""
        bit, held, new = 1 << self._slot(replica), self._held[replica], []
        for block in blocks:
            if not (count := held.get(block, 0)):
                new.append(block)
            held[block] = count + 1
        self._toggle(new, bit)

    def release(self, replica: str, blocks: Iterable[int]) -> None:
        """A prompt does not hold these blocks any more; others may."""
        held, gone = self._held.get(replica, OrderedDict[int, int]()), []
        for block in blocks:
            if (count := held.get(block, 0)) > 1:
                held[block] = count - 1
            elif count:
                gone.append(block)
        self.removed(replica, gone)

    def resize(self, replica: str, limit: int) -> None:
        """Limits a replica to so many blocks, once it stores the next; 0: to the limit of all."""
        if limit:
            self._limits[replica] = limit
        else:
            self._limits.pop(replica, None)

    def remove_replica(self, replica: str) -> None:
        """A replica holds nothing any more."""
        self._limits.pop(replica, None)
        if replica in self._slots:
            slot = self._slots.pop(replica)
            self._names[slot] = ""
            self._generation += 1
            self._toggle(self._held.pop(replica), 1 << slot)

    def match(self, blocks: Sequence[int]) -> ReplicaMatch:
        """Who holds how many of these blocks without a gap."""
        levels: list[tuple[int, int]] = []
        holders, last = -1, None
        for i, block in enumerate(blocks):
            found = self._holders.get(block, 0)
            if found is last:
                continue
            last = found
            left = holders & found
            if left != holders and i:
                levels.append((i, holders))
            holders = left
            if not holders:
                break
        else:
            if blocks:
                levels.append((len(blocks), holders))
        size = len(self._names)
        return ReplicaMatch(tuple(reversed(levels)), self._slots, size, self._generation)

    def _slot(self, replica: str) -> int:
        if replica not in self._slots:
            if "" in self._names:
                slot = self._names.index("")
                self._names[slot] = replica
            else:
                slot = len(self._names)
                self._names.append(replica)
            self._slots[replica] = slot
            self._generation += 1
            self._held[replica] = OrderedDict()
        return self._slots[replica]

    def _toggle(self, blocks: Iterable[int], bit: int) -> None:
        """Adds a replica to the holders of blocks that it did not hold, or takes it from those that
        it did. Blocks with the same bitmap go on sharing one."""
        before, after = -1, -1
        for block in blocks:
            holders = self._holders.get(block, 0)
            if holders is not before:
                before, after = holders, holders ^ bit
            if after:
                self._holders[block] = after
            else:
                del self._holders[block]
