"""What a gateway keeps in a database: releases, experiments, configurations, and who keeps which
response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from octavo.database import DatabaseError, open_database
from octavo.errors import OctavoError, place
from octavo.experiments import controller as of_experiments
from octavo.experiments import store as experiment_store
from octavo.experiments.controller import Experiments
from octavo.experiments.store import ExperimentStore
from octavo.gateway import config_history
from octavo.gateway import kept as responses
from octavo.gateway.config_history import ConfigHistory
from octavo.release import controller as of_releases
from octavo.release import store as release_store
from octavo.release.controller import Releases
from octavo.release.store import ReleaseStore

TABLES = (
    *release_store.TABLES, *experiment_store.TABLES, *config_history.TABLES, *responses.TABLES,
)  # fmt: skip
LOG = logging.getLogger("octavo.gateway")


@dataclass(frozen=True)
class GatewayState:
    releases: Releases
    experiments: Experiments
    history: ConfigHistory
    kept: responses.KeptResponses


@asynccontextmanager
async def kept_in(database: str | None) -> AsyncIterator[GatewayState]:
    """Releases and experiments as they go on; what was seen is written at the end. None: in memory.
    Raises OctavoError."""
    opened, end = await asyncio.to_thread(open_database, database, TABLES), asyncio.Event()
    try:
        releases, experiments = Releases(ReleaseStore(opened)), Experiments(ExperimentStore(opened))
        tasks = [
            asyncio.create_task(_keep(releases, of_releases.TICK, "releases", end)),
            asyncio.create_task(_keep(experiments, of_experiments.TICK, "experiments", end)),
        ]
        try:
            yield GatewayState(
                releases, experiments, ConfigHistory(opened), responses.KeptResponses(opened)
            )
        finally:
            end.set()
            await asyncio.gather(*tasks)
            with suppress(DatabaseError):
                await releases.close()
    finally:
        opened.close()


async def _keep(
    kept: Releases | Experiments, seconds: float, what: str, end: asyncio.Event
) -> None:
    """Writes, reads and decides until the end, and then once more: what is being written is never
    left half-way. A database that is away is asked again; requests go on as they were."""
    told = ""
    while True:
        last = end.is_set()
        try:
            await kept.tick()
            told = ""
        except Exception as e:
            why = str(e) if isinstance(e, OctavoError) else place(e)
            if why != told:
                LOG.warning("%s wait: %s", what, why)
            told = why
        if last:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await end.wait()
