"""The experiments of a gateway: who has which variant, and what was seen of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from octavo.errors import InvalidValue
from octavo.experiments.analysis import Analysis, analyse
from octavo.experiments.spec import ExperimentSpec, Unit, Variant
from octavo.experiments.store import Experiment, ExperimentStore, NoExperiment
from octavo.experiments.totals import Key, Total, Totals
from octavo.release.assignment import bucket
from octavo.release.events import RequestEvent

TICK = 1.0  # seconds between two looks
MOST_PENDING = 1_000_000  # sums that wait for a database that is away; then events are not counted
MOST_AT_ONCE = 10_000  # of them that are written in a transaction, which may not take long


@dataclass(frozen=True)
class Chosen:
    """The variant of a request. unit: what was assigned, as a digest. stage: how often shares had
    been changed."""

    experiment: str
    name: str
    variant: Variant
    unit: str
    stage: int = 0


class Experiments:
    """clock: seconds since 1970."""

    def __init__(self, store: ExperimentStore, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._pending: dict[str, Totals] = {}
        self._of: dict[str, Experiment] = {}
        self._reading = asyncio.Lock()  # what was read first is known first
        self._adopt(store.all())

    # -- requests: on the event loop, without waiting -----------------------------------------

    def assign(self, model: str, units: Mapping[Unit, str]) -> Chosen | None:
        """The variant of a request, by the first of its units that the experiment on its model
        names; None: it takes part in none."""
        for one in self._of.values():
            if one.spec.model == model:
                kind = next((kind for kind in one.spec.unit if units.get(kind)), None)
                if kind is None:
                    return None
                unit = f"{kind}:{units[kind]}"
                name = one.allocation.variant(bucket(one.spec.id, unit))
                if name is None:
                    return None
                variant, kept = one.spec.variants[name], digest(one.spec.id, unit)
                return Chosen(one.spec.id, name, variant, kept, len(one.dealt) - 1)
        return None

    def observe(self, chosen: Chosen, event: RequestEvent) -> None:
        """A request that took part has ended."""
        one = self._of.get(chosen.experiment)
        if one is not None and (totals := self._room(chosen.experiment)):
            totals.observe(one.spec, chosen.name, chosen.unit, event)
            totals.dealt(chosen.name, chosen.unit, chosen.stage)

    def feedback(self, id: str, metric: str, value: float, units: Mapping[Unit, str]) -> None:
        """What a unit thinks of its answer. Raises RequestError."""
        if (one := self._of.get(id)) is None:
            raise NoExperiment(f"there is no experiment {id[:64]!r} that goes on", "experiment")
        if metric not in one.spec.feedback:
            known = ", ".join(one.spec.feedback)
            raise InvalidValue(f"metric: {id[:64]!r} takes {known or 'no feedback'}", "metric")
        chosen = self.assign(one.spec.model, units)
        if chosen is None or chosen.experiment != id:
            raise InvalidValue("unit: it takes no part in the experiment", "unit")
        if totals := self._room(id):
            totals.add(chosen.name, chosen.unit, metric, value)
            totals.dealt(chosen.name, chosen.unit, chosen.stage)

    def _room(self, id: str) -> Totals | None:
        """The sums that wait to be written, None where they are too many."""
        totals = self._pending.setdefault(id, Totals())
        return totals if len(totals.of) < MOST_PENDING else None

    # -- the database -------------------------------------------------------------------------

    async def tick(self) -> None:
        """Writes what was seen, and reads what experiments there are."""
        for id in list(self._pending):
            await self._write(id)
        await self.refresh()

    async def refresh(self) -> None:
        """Reads what experiments there are: they are in force here from now on."""
        async with self._reading:
            self._adopt(await asyncio.to_thread(self._store.all))

    async def _write(self, id: str) -> None:
        """Writes what was seen of an experiment, in parts. Raises what the database does: what it
        has not taken waits with what was seen meanwhile."""
        totals, part = self._pending.pop(id), dict[Key, Total]()
        try:
            while totals.of:
                part = dict(totals.of.popitem() for _ in range(min(len(totals.of), MOST_AT_ONCE)))
                await asyncio.to_thread(self._store.add, id, part)
        except Exception:
            totals.of |= part
            for (variant, unit, name), one in self._pending.pop(id, Totals()).of.items():
                totals.add(variant, unit, name, one.total, one.count)
            self._pending[id] = totals
            raise

    def _adopt(self, found: list[Experiment]) -> None:
        self._of = {one.spec.id: one for one in found if not one.ended}

    # -- what people ask for: may wait for the database -----------------------------------------

    def start(self, spec: ExperimentSpec, who: str) -> Experiment:
        """Begins an experiment; a model has one at a time. Raises OctavoError."""
        return self._store.start(spec.check(), self._clock(), who)

    def stop(self, id: str, who: str) -> None:
        self._store.stop(id, self._clock(), who)

    def change_shares(self, id: str, shares: Mapping[str, float], who: str) -> None:
        self._store.change_shares(id, shares, self._clock(), who)

    def all(self) -> list[Experiment]:
        return self._store.all()

    def report(self, id: str) -> tuple[Experiment, dict[Key, Total], Analysis]:
        """Raises NoExperiment."""
        one, totals = self._store.find(id), self._store.totals(id)
        return one, totals, analyse(one.spec, totals, one.dealt)


def digest(salt: str, unit: str) -> str:
    """What is kept of a unit: not who it is."""
    return blake2b(f"{salt}\0{unit}".encode(errors="replace"), digest_size=12).hexdigest()
