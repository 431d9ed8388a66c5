"""What gateways keep of releases, so that several agree and each goes on after a restart."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from octavo.database import Conflict, Database, DatabaseConnection, Unreadable
from octavo.errors import RequestError
from octavo.release.machine import ENDED, State
from octavo.release.spec import ReleaseSpec
from octavo.release.tally import Rows, add

TABLES = (
    "create table if not exists releases (id text primary key, model text not null,"
    " created double precision not null, ended bigint not null, version bigint not null,"
    " spec text not null, state text not null)",
    "create unique index if not exists one_release on releases (model) where ended = 0",
    "create table if not exists sums (release text not null, gateway text not null,"
    " step bigint not null, part bigint not null, numbers bytea not null,"
    " primary key (release, gateway, step, part))",
    "create table if not exists audit (id text primary key, at double precision not null,"
    " subject text not null, who text not null, what text not null, detail text not null)",
    "create table if not exists leases (name text primary key, owner text not null,"
    " until double precision not null)",
)
LEASE = 10.0  # seconds for which who decides about releases need not ask
APART = 0.001  # seconds that releases of a model are apart at least


class NoRelease(RequestError):
    status = 404


class AlreadyRuns(RequestError):
    """There is one already."""

    status = 409


@dataclass(frozen=True)
class Release:
    """A release as it is kept. created: seconds since 1970; later than that of any before it.
    version: of its state; each change makes the next."""

    id: str
    spec: ReleaseSpec
    state: State
    created: float
    version: int = 0

    @property
    def winner(self) -> str:
        """The pool that serves the model once it has ended."""
        return self.spec.canary if self.state.phase == "promoted" else self.spec.stable


@dataclass(frozen=True)
class AuditEntry:
    """Something that happened. who: the name of a key, or `octavo`."""

    at: float
    subject: str
    who: str
    what: str
    detail: str


class ReleaseStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def start(self, spec: ReleaseSpec, state: State, who: str) -> Release:
        """Keeps a new release, which is the last whatever the clock said before. Raises AlreadyRuns
        if its model has one that has not ended."""
        id, encoded = f"rel_{secrets.token_hex(6)}", (_json(spec), _json(state))
        try:
            with self._database.transaction() as db:
                before = "select max(created) from releases where model = ?"
                ((last,),) = db.execute(before, (spec.model,))
                created = max(state.since, (last or 0.0) + APART)
                db.execute(
                    "insert into releases values (?, ?, ?, 0, 0, ?, ?)",
                    (id, spec.model, created, *encoded),
                )
                audit(db, AuditEntry(state.since, id, who, "start", encoded[0]))
        except Conflict:
            raise AlreadyRuns(f"{spec.model!r} has a release that has not ended", "model") from None
        return Release(id, spec, state, created)

    def latest(self) -> dict[str, Release]:
        """The last release of each model."""
        with self._database.transaction() as db:
            rows = db.execute(
                "select id, spec, state, created, version from releases r where created ="
                " (select max(created) from releases o where o.model = r.model)"
            )
        found = [_release(row) for row in rows]
        return {one.spec.model: one for one in found}

    def find(self, model: str) -> Release:
        """The last release of a model. Raises NoRelease."""
        if (found := self.latest().get(model)) is None:
            raise NoRelease(f"{model[:64]!r} has no release", "model")
        return found

    def change(self, release: Release, state: State, who: str, at: float) -> bool:
        """Keeps the next state, unless somebody changed it meanwhile."""
        with self._database.transaction() as db:
            done = db.execute(
                "update releases set state = ?, ended = ?, version = version + 1"
                " where id = ? and version = ? returning id",
                (_json(state), int(state.phase in ENDED), release.id, release.version),
            )
            if done:
                what = (
                    state.phase if state.phase != release.state.phase else f"step {state.step + 1}"
                )
                audit(db, AuditEntry(at, release.id, who, what, state.reason))
        return bool(done)

    # -- sums ---------------------------------------------------------------------------------

    def put_sums(self, release: str, gateway: str, rows: Rows) -> None:
        """Keeps all that a gateway has seen in some rows, in place of what it had there: doing it
        twice counts nothing twice."""
        with self._database.transaction() as db:
            db.many(
                "insert into sums values (?, ?, ?, ?, ?) on conflict (release, gateway, step, part)"
                " do update set numbers = excluded.numbers",
                [
                    (release, gateway, *key, row.astype("<f8").tobytes())
                    for key, row in rows.items()
                ],
            )

    def sums(self, release: str) -> Rows:
        """What all gateways have seen."""
        with self._database.transaction() as db:
            found = db.execute("select step, part, numbers from sums where release = ?", (release,))
        total: Rows = {}
        for step, part, numbers in found:
            add(total, {(int(step), int(part)): np.frombuffer(numbers, "<f8")})
        return total

    # -- leases and the audit trail -----------------------------------------------------------

    def lease(self, name: str, owner: str, now: float) -> bool:
        """Whether `owner` may decide until LEASE seconds from now; nobody else may meanwhile."""
        with self._database.transaction() as db:
            return bool(
                db.execute(
                    "insert into leases values (?, ?, ?) on conflict (name) do update set"
                    " owner = excluded.owner, until = excluded.until"
                    " where leases.owner = excluded.owner or leases.until < ? returning name",
                    (name, owner, now + LEASE, now),
                )
            )

    def release_lease(self, name: str, owner: str) -> None:
        with self._database.transaction() as db:
            db.execute("delete from leases where name = ? and owner = ?", (name, owner))

    def trail(self, subject: str) -> list[AuditEntry]:
        """All that happened to something, the first first."""
        with self._database.transaction() as db:
            rows = db.execute(
                "select at, subject, who, what, detail from audit where subject = ?"
                " order by at, id",
                (subject,),
            )
        return [AuditEntry(*row) for row in rows]


def audit(db: DatabaseConnection, entry: AuditEntry) -> None:
    """Adds to the audit trail, in the transaction of what is recorded."""
    rows = "insert into audit values (?, ?, ?, ?, ?, ?)"
    row = (entry.at, entry.subject, entry.who, entry.what, entry.detail)
    # Of two at the same moment the first one's id is the lower.
    db.execute(rows, (f"{time.time_ns():016x}{secrets.token_hex(4)}", *row))


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _release(row: tuple[Any, ...]) -> Release:
    id, spec, state, created, version = row
    try:
        return Release(
            id, msgspec.json.decode(spec, type=ReleaseSpec), State(**msgspec.json.decode(state)),
            created, int(version),
        )  # fmt: skip
    except (msgspec.DecodeError, TypeError) as e:
        raise Unreadable(f"the release {id}", e) from None
