"""Which part of the traffic a unit (a user, a session, a request) belongs to, by its hash."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from octavo.errors import UsageError

BUCKETS = 10_000  # shares are multiples of 0.01 %


def bucket(salt: str, unit: str) -> int:
    """Where a unit lies: the same in every process, and unrelated between salts."""
    digest = hashlib.blake2b(unit.encode(errors="replace"), digest_size=8, key=_key(salt))
    return int.from_bytes(digest.digest(), "big") * BUCKETS >> 64


def _key(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode(errors="replace"), digest_size=16).digest()


def whole_buckets(shares: Mapping[str, float]) -> dict[str, int]:
    """Shares as numbers of buckets. Raises UsageError."""
    if any(not share >= 0 for share in shares.values()):
        raise UsageError("a share is a number of 0 or more")
    found = {name: round(share * BUCKETS) for name, share in shares.items()}
    if (total := sum(found.values())) > BUCKETS:
        if total > BUCKETS + len(found):  # more than rounding
            raise UsageError(f"the shares are {total / BUCKETS:.4g} together, more than 1")
        found[max(found, key=found.__getitem__)] -= total - BUCKETS
    return found


@dataclass(frozen=True)
class Range:
    """Buckets from `start` up to `end` belong to a variant; None: to none."""

    start: int
    end: int
    variant: str | None


@dataclass(frozen=True)
class Allocation:
    """Who has which buckets. It is kept: with three variants no rule that looks at the shares alone
    could let each one only grow."""

    ranges: tuple[Range, ...] = (Range(0, BUCKETS, None),)

    @classmethod
    def of(cls, shares: Mapping[str, float]) -> Allocation:
        return cls().changed(shares)

    @property
    def shares(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for part in self.ranges:
            if part.variant is not None:
                size = (part.end - part.start) / BUCKETS
                found[part.variant] = found.get(part.variant, 0.0) + size
        return found

    def variant(self, at: int) -> str | None:
        """Who has a bucket."""
        return next(part.variant for part in self.ranges if at < part.end)

    def changed(self, shares: Mapping[str, float]) -> Allocation:
        """With other shares: who grows keeps all it has, who shrinks gives away its last buckets,
        and no other bucket changes hands. Raises UsageError."""
        wanted = whole_buckets(shares)
        owners = [part.variant for part in self.ranges for _ in range(part.start, part.end)]
        for at, owner in enumerate(owners):
            if owner is not None and wanted.get(owner, 0) > 0:
                wanted[owner] -= 1
            else:
                owners[at] = None
        missing = (name for name, count in wanted.items() for _ in range(count))
        for at, owner in enumerate(owners):
            if owner is None:
                owners[at] = next(missing, None)
        return Allocation(tuple(_ranges(owners)))


def _ranges(owners: list[str | None]) -> list[Range]:
    edges = [at for at in range(1, BUCKETS) if owners[at] != owners[at - 1]]
    return [Range(a, b, owners[a]) for a, b in pairwise([0, *edges, BUCKETS])]
