"""Allocates KV blocks, a fixed number of them, with reference counts."""

from __future__ import annotations


class BlockAllocator:
    """Blocks `0..count-1`. A block is free when it has no references.

    reached: blocks from this number on were never allocated.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.reached = 0
        self._references = [0] * count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def allocate(self) -> int | None:
        """A block with one reference, or None if none is free."""
        if not self._free:
            return None
        block = self._free.pop()
        assert self._references[block] == 0
        self._references[block] = 1
        self.reached = max(self.reached, block + 1)
        return block

    def share(self, block: int) -> None:
        """Adds a reference."""
        assert self._references[block] > 0
        self._references[block] += 1

    def free(self, block: int) -> int:
        """Drops a reference and returns how many are left."""
        assert self._references[block] > 0
        self._references[block] -= 1
        if not self._references[block]:
            self._free.append(block)
        return self._references[block]

    def references(self, block: int) -> int:
        return self._references[block]
