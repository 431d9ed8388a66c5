"""What a gateway keeps: its releases and experiments, in a database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from octavo.experiments.controller import Experiments
from octavo.experiments.store import ExperimentStore
from octavo.release.controller import Releases
from octavo.release.database import open_database
from octavo.release.store import ReleaseStore


@asynccontextmanager
async def kept_in(database: str | None) -> AsyncIterator[tuple[Releases, Experiments]]:
    """Releases and experiments as they go on; what was seen is written at the end. None: in memory.
    Raises OctavoError."""
    opened = await asyncio.to_thread(open_database, database)
    try:
        releases, experiments = Releases(ReleaseStore(opened)), Experiments(ExperimentStore(opened))
        tasks = [asyncio.create_task(one.run()) for one in (releases, experiments)]
        try:
            yield releases, experiments
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await releases.close()
            await experiments.close()
    finally:
        opened.close()
