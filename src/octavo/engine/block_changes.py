"""What an engine tells of its prefix cache to what routes requests to it."""

from __future__ import annotations

from octavo.balance.chain import root


def salt_root(salt: str) -> int:
    """What the chain of a prompt begins with, of a salt as sequences have it: an adapter's part
    ends with a number that each engine counts for itself, which is left out."""
    own, end, _ = salt.rpartition("\0")
    return root(own if end else salt)


class BlockChanges:
    """The whole blocks that a prefix index has stored, and those that it has removed, since they
    were taken last. A block that came and went meanwhile is neither."""

    def __init__(self) -> None:
        self._stored: dict[int, None] = {}  # in their order
        self._removed: dict[int, None] = {}

    def store(self, block: int) -> None:
        if block in self._removed:
            del self._removed[block]
        else:
            self._stored[block] = None

    def remove(self, block: int) -> None:
        if block in self._stored:
            del self._stored[block]
        else:
            self._removed[block] = None

    def take(self) -> tuple[list[int], list[int]]:
        """What was stored and what was removed."""
        taken = list(self._stored), list(self._removed)
        self._stored.clear()
        self._removed.clear()
        return taken
