"""Which pool of upstreams a model's requests go to: a table that is swapped as a whole.

A release gives a model two versions with weights, and swaps the table at each of its steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from octavo.gateway.upstream import DEFAULT, FALLBACK


@dataclass(frozen=True)
class Version:
    """A pool that serves a model. weight: of its share."""

    name: str
    pool: str
    weight: float = 1.0


@dataclass(frozen=True)
class ModelRoute:
    """The versions of a model, the newest last, and pools for when none of a version's upstreams
    can be had. salt: other salts deal the same units anew."""

    versions: tuple[Version, ...] = (Version("", DEFAULT),)
    fallback: tuple[str, ...] = (FALLBACK,)
    salt: str = ""

    def version(self, unit: str) -> Version:
        """The version of a unit: a user, a session. As the weight of the last one grows, units only
        move to it."""
        total = sum(v.weight for v in self.versions)
        digest = blake2b(f"{self.salt}\0{unit}".encode(), digest_size=8).digest()
        point = int.from_bytes(digest) / 2**64 * total
        for version in reversed(self.versions):
            if point < version.weight:
                return version
            point -= version.weight
        return self.versions[0]


@dataclass(frozen=True)
class RouteTable:
    """The routes of models; those of all others are `other`."""

    models: Mapping[str, ModelRoute] = field(default_factory=dict)
    other: ModelRoute = ModelRoute()

    def route(self, model: str) -> ModelRoute:
        return self.models.get(model, self.other)
