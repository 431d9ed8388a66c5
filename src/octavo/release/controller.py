"""The releases of a gateway: who is served by which version, and what is decided of it.

Every gateway adds its events up and writes its sums; the one that holds the lease adds those of all
and decides. What it decided is written only if nobody else changed the release meanwhile.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.release import machine
from octavo.release.assignment import BUCKETS, bucket
from octavo.release.events import RequestEvent
from octavo.release.machine import ENDED, Action, NotNow
from octavo.release.spec import ReleaseSpec
from octavo.release.store import AuditEntry, NoRelease, Release, ReleaseStore
from octavo.release.tally import BASELINE, CANARY, Key, ReleaseSummary, Rows, Tally

TICK = 0.25  # seconds between two looks
LEASE = "releases"  # its name


@dataclass(frozen=True)
class Assigned:
    """Where a request goes, and what its event has to say of it. stable, canary: the pools of both
    versions. watched: the release goes on, so that somebody wants to know. shadow: of the requests
    like this one, the part whose answers the canary is shown."""

    release: str
    pool: str
    arm: str
    step: int
    watched: bool
    stable: str
    canary: str
    shadow: float


@dataclass(frozen=True)
class Status:
    """A release with what all gateways have seen of it, and what happened to it."""

    release: Release
    seen: ReleaseSummary
    shares: dict[str, float]
    trail: list[AuditEntry]


@dataclass
class _Local:
    """A release with what this gateway has seen of it. dirty: rows that are not written yet."""

    release: Release
    tally: Tally
    rows: Rows = field(default_factory=dict)
    dirty: set[Key] = field(default_factory=set)

    def observe(self, event: RequestEvent) -> None:
        key = self.tally.observe(self.rows, event, self.release.state.began)
        if key is not None:
            self.dirty.add(key)


class Releases:
    """clock: seconds since 1970; changed: called when a release goes on, with its new state."""

    def __init__(self, store: ReleaseStore, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self.changed: Callable[[Release], None] = lambda release: None
        self._owner = secrets.token_hex(8)
        self._local: dict[str, _Local] = {}  # by model
        self._reading = asyncio.Lock()  # what was read first is known first
        self._adopt(store.latest())

    # -- requests: on the event loop, without waiting -----------------------------------------

    def assign(self, model: str, unit: str) -> Assigned | None:
        """Which pool serves a unit of a model; None where none was ever released."""
        if (local := self._local.get(model)) is None:
            return None
        release = local.release
        spec, state = release.spec, release.state
        arm = machine.arm(spec, state, bucket(release.id, unit) / BUCKETS)
        pool = {CANARY: spec.canary, BASELINE: spec.baseline}.get(arm) or spec.stable
        watched = state.phase not in ENDED
        shadow = spec.shadowed if watched and arm != CANARY else 0.0
        return Assigned(
            release.id, pool, arm, state.step, watched, spec.stable, spec.canary, shadow
        )

    def last(self, model: str) -> Release | None:
        """The last release of a model, as this gateway knows it."""
        local = self._local.get(model)
        return None if local is None else local.release

    def observe(self, model: str, assigned: Assigned, event: RequestEvent) -> None:
        """A request that was assigned has ended."""
        local = self._local.get(model)
        if local is None or local.release.id != assigned.release:
            return
        local.observe(event)

    def shadow(self, model: str, kl: Sequence[float], release: str = "") -> None:
        """What was measured of answers of the old version that the canary was shown: how far they
        are apart, nats a token. release: which it was measured for, if that is known. Raises
        NoRelease."""
        local = self._local.get(model)
        if (
            local is None
            or local.release.state.phase in ENDED
            or release not in ("", local.release.id)
        ):
            raise NoRelease(f"{model[:64]!r} has no release that goes on", "model")
        state = local.release.state
        for value in kl:
            local.observe(RequestEvent(CANARY, self._clock(), state.step, kl=value))

    # -- decisions ----------------------------------------------------------------------------

    async def tick(self) -> None:
        """Writes what was seen, decides if that is this gateway's turn, reads what was decided."""
        written = {
            local.release.id: {key: local.rows[key].copy() for key in local.dirty}
            for local in self._local.values()
        }
        await asyncio.to_thread(self._exchange, written)
        for local in self._local.values():
            rows = written.get(local.release.id, {})
            same = {key for key, row in rows.items() if (local.rows[key] == row).all()}
            local.dirty -= same
        await self.refresh()

    async def refresh(self) -> None:
        """Reads what releases there are: they are in force here from now on."""
        async with self._reading:
            self._adopt(await asyncio.to_thread(self._store.latest))

    def _exchange(self, written: dict[str, Rows]) -> None:
        for id, rows in written.items():
            if rows:
                self._store.put_sums(id, self._owner, rows)
        open = [one for one in self._store.latest().values() if one.state.phase not in ENDED]
        if open and self._store.lease(LEASE, self._owner, self._clock()):
            for release in open:
                self._decide(release)

    def _decide(self, release: Release) -> None:
        """Lets a release go on, if it should."""
        now = self._clock()
        state = machine.advance(release.spec, release.state, self._seen(release), now)
        if state != release.state:
            self._store.change(release, state, "octavo", now)

    def _seen(self, release: Release) -> ReleaseSummary:
        return Tally(release.spec).read(self._store.sums(release.id))

    def _adopt(self, latest: dict[str, Release]) -> None:
        for model, release in latest.items():
            local = self._local.get(model)
            if local is None or local.release.id != release.id:
                self._local[model] = _Local(release, Tally(release.spec))
            elif local.release.version == release.version:
                continue
            else:
                local.release = release
            self.changed(release)

    # -- what people ask for: may wait for the database -----------------------------------------

    def start(self, spec: ReleaseSpec, who: str) -> Release:
        """Begins a release. Raises OctavoError."""
        return self._store.start(spec.check(), machine.start(self._clock()), who)

    def act(self, model: str, action: Action, who: str) -> Release:
        """Changes a release as somebody wants. Raises OctavoError, NotNow also for a promotion of
        a step that somebody else has ended meanwhile: it would be two steps at once."""
        while True:
            release = self._store.find(model)
            canary, now = self._seen(release).canary, self._clock()
            state = machine.act(release.spec, release.state, action, canary, now, who)
            if self._store.change(release, state, who, now):
                return self._store.find(model)
            if action == "promote":
                raise NotNow(f"the release of {model[:64]} was changed meanwhile", "model")

    def status(self, model: str) -> Status:
        """Raises NoRelease."""
        release = self._store.find(model)
        shares = machine.shares(release.spec, release.state)
        return Status(release, self._seen(release), shares, self._store.trail(release.id))

    def latest(self) -> dict[str, Release]:
        """The last release of each model."""
        return self._store.latest()

    async def close(self) -> None:
        """Lets another gateway decide at once. Raises DatabaseError."""
        await asyncio.to_thread(self._store.release_lease, LEASE, self._owner)
