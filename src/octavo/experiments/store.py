"""What gateways keep of experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from octavo.database import Conflict, Database, Unreadable
from octavo.errors import RequestError, UsageError
from octavo.experiments.spec import ExperimentSpec
from octavo.experiments.totals import Key, Total
from octavo.release.assignment import Allocation, Range
from octavo.release.store import AlreadyRuns, AuditEntry, audit

# Beside those of releases.
TABLES = (
    "create table if not exists experiments (id text primary key,"
    " created double precision not null, ended bigint not null, version bigint not null,"
    " spec text not null, allocation text not null)",
    "create table if not exists units (experiment text not null, variant text not null,"
    " unit text not null, name text not null, count double precision not null,"
    " total double precision not null, primary key (experiment, variant, unit, name))",
)
EXPERIMENTS = "select spec, allocation, created, ended, version from experiments"


class NoExperiment(RequestError):
    status = 404


class ExperimentEnded(RequestError):
    """Nothing of it changes any more."""

    status = 409


@dataclass(frozen=True)
class Experiment:
    """An experiment as it is kept. dealt: the shares that it had, the last are those of its spec.
    version: of its allocation; each change makes the next."""

    spec: ExperimentSpec
    allocation: Allocation
    created: float
    dealt: tuple[Mapping[str, float], ...]
    ended: bool = False
    version: int = 0


class ExperimentStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def start(self, spec: ExperimentSpec, now: float, who: str) -> Experiment:
        """Begins an experiment; a model has one at a time. Raises AlreadyRuns, also if there was
        one of that name: its units are dealt already."""
        found = Experiment(spec, Allocation.of(spec.shares), now, (spec.shares,))
        encoded = _json(spec), _kept(found.allocation, found.dealt)
        try:
            with self._database.transaction() as db:
                # Who begins another one at the same time waits here until this one is kept.
                db.execute(
                    "insert into leases values ('experiments', '', 0)"
                    " on conflict (name) do update set owner = excluded.owner"
                )
                for one in map(_experiment, db.execute(f"{EXPERIMENTS} where ended = 0")):
                    if one.spec.model == spec.model:
                        raise AlreadyRuns(
                            f"{spec.model!r} has an experiment that has not ended: {one.spec.id}",
                            "model",
                        )
                db.execute(
                    "insert into experiments values (?, ?, 0, 0, ?, ?)", (spec.id, now, *encoded)
                )
                audit(db, AuditEntry(now, spec.id, who, "start", encoded[0]))
        except Conflict:
            raise AlreadyRuns(
                f"there was an experiment {spec.id!r}; take another name", "id"
            ) from None
        return found

    def all(self) -> list[Experiment]:
        """Every experiment, the first first."""
        with self._database.transaction() as db:
            rows = db.execute(f"{EXPERIMENTS} order by created")
        return [_experiment(row) for row in rows]

    def find(self, id: str) -> Experiment:
        """Raises NoExperiment."""
        for one in self.all():
            if one.spec.id == id:
                return one
        raise NoExperiment(f"there is no experiment {id[:64]!r}", "id")

    def change_shares(self, id: str, shares: Mapping[str, float], now: float, who: str) -> None:
        """Gives variants other shares, by moving as few units as can be. Raises OctavoError."""
        while True:
            one = self.find(id)
            if one.ended:
                raise _ended(id)
            spec = _with_shares(one.spec, shares)
            allocation, dealt = one.allocation.changed(spec.shares), (*one.dealt, spec.shares)
            values = _json(spec), _kept(allocation, dealt)
            with self._database.transaction() as db:
                done = db.execute(
                    "update experiments set spec = ?, allocation = ?, version = version + 1"
                    " where id = ? and version = ? returning id",
                    (*values, id, one.version),
                )
                if done:
                    audit(db, AuditEntry(now, id, who, "shares", _json(dict(shares))))
                    return

    def stop(self, id: str, now: float, who: str) -> None:
        """Ends an experiment: everybody gets what they ask for again. Raises NoExperiment,
        ExperimentEnded."""
        self.find(id)
        with self._database.transaction() as db:
            if not db.execute(
                "update experiments set ended = 1, version = version + 1"
                " where id = ? and ended = 0 returning id",
                (id,),
            ):
                raise _ended(id)
            audit(db, AuditEntry(now, id, who, "stop", ""))

    def add(self, id: str, totals: Mapping[Key, Total]) -> None:
        """Adds what was seen since the last time, in one order: two gateways that add to the same
        units in different ones would wait for each other."""
        with self._database.transaction() as db:
            db.many(
                "insert into units values (?, ?, ?, ?, ?, ?)"
                " on conflict (experiment, variant, unit, name) do update set"
                " count = units.count + excluded.count, total = units.total + excluded.total",
                [(id, *key, one.count, one.total) for key, one in sorted(totals.items())],
            )

    def totals(self, id: str) -> dict[Key, Total]:
        """What all gateways have seen."""
        with self._database.transaction() as db:
            rows = db.execute(
                "select variant, unit, name, count, total from units where experiment = ?", (id,)
            )
        return {(variant, unit, name): Total(*rest) for variant, unit, name, *rest in rows}


def _with_shares(spec: ExperimentSpec, shares: Mapping[str, float]) -> ExperimentSpec:
    if unknown := sorted(set(shares) - set(spec.variants)):
        names = ", ".join(spec.variants)
        raise UsageError(f"{spec.id} has no variant {unknown[0][:64]!r}, but {names}")
    variants = {
        name: msgspec.structs.replace(one, weight=100 * shares.get(name, one.weight / 100))
        for name, one in spec.variants.items()
    }
    return msgspec.structs.replace(spec, variants=variants).check()


def _ended(id: str) -> ExperimentEnded:
    return ExperimentEnded(f"the experiment {id[:64]!r} has ended already", "id")


def _kept(allocation: Allocation, dealt: Sequence[Mapping[str, float]]) -> str:
    return _json(asdict(allocation) | {"dealt": dealt})


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _experiment(row: tuple[Any, ...]) -> Experiment:
    text, kept, created, ended, version = row
    try:
        spec, found = msgspec.json.decode(text, type=ExperimentSpec), msgspec.json.decode(kept)
        allocation = Allocation(tuple(Range(**part) for part in found["ranges"]))
    except (msgspec.DecodeError, TypeError, LookupError) as e:
        raise Unreadable(f"the experiment {text[:64]!r}", e) from None
    dealt = tuple(found.get("dealt", [spec.shares]))  # which older ones did not keep
    return Experiment(spec, allocation, created, dealt, bool(ended), int(version))
