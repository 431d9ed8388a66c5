"""Loads models when they are asked for, within one budget of memory.

Room is made by unloading, the least recently used first: never a pinned model, never one that
answers. If all answer, the one used longest ago gets no new requests, so that it falls idle.
"""

from __future__ import annotations

import asyncio
import logging
import time

from octavo.engine.plan import size
from octavo.errors import DoesNotFit, OctavoError, Overloaded, RequestError
from octavo.server.background import to_its_end
from octavo.server.registry import Entry, ModelLease, unusable

LOG = logging.getLogger("octavo.server")
LOOKS = 4  # for idle models, within the time that one may be idle


class ModelPool:
    """The loaded models of a server. budget: bytes for all of them. keep_alive: seconds after which
    an idle model is unloaded; None: only for another."""

    def __init__(self, budget: int, keep_alive: float | None = None) -> None:
        self._budget = budget
        self._keep_alive = keep_alive
        self._sizes: dict[Entry, int] = {}  # of loaded models, and of one that is being loaded
        self._turn = asyncio.Lock()  # one model after the other comes or goes, first come first
        self._tasks: dict[Entry, asyncio.Task[None]] = {}

    def has_room(self, entry: Entry) -> bool:
        """Whether a model can be loaded beside those that are. May block. Raises OctavoError."""
        return entry.source is not None and entry.source.total <= self.free

    @property
    def free(self) -> int:
        """Bytes of the budget that no model has."""
        return self._budget - sum(self._sizes.values())

    async def admit(self, lease: ModelLease) -> None:
        """Grants a lease once its model is loaded. Raises RequestError if it cannot be."""
        entry = lease.entry
        entry.waiting.append(lease)
        if entry not in self._tasks:
            task = self._tasks[entry] = asyncio.create_task(self.load(entry))
            task.add_done_callback(lambda t: t.cancelled() or t.exception())  # waiters have it too
        task = self._tasks[entry]
        try:
            await asyncio.shield(task)
        except BaseException as e:
            if lease in entry.waiting:
                entry.waiting.remove(lease)
            lease.release()
            if task.cancelled():
                late = "the server is shutting down"
                raise Overloaded(late, code="shutting_down") from None
            if isinstance(e, OctavoError) and not isinstance(e, RequestError):
                raise unusable(entry.name, e) from None
            raise

    async def load(self, entry: Entry) -> None:
        """Loads a model unless it is loaded, and grants all leases that wait for it.

        Raises OctavoError.
        """
        try:
            async with self._turn:
                if entry.model is None:
                    await self._load(entry)
                for lease in entry.waiting:
                    lease.grant()
                entry.waiting.clear()
        finally:
            self._tasks.pop(entry, None)

    async def _load(self, entry: Entry) -> None:
        source = entry.source
        assert source is not None
        total = await asyncio.to_thread(lambda: source.total)
        self._check_fits(entry, total)
        while total > self.free:
            if (victim := await self._victim()) is not None:
                await self._unload(victim)
            self._check_fits(entry, total)  # a model may have been pinned meanwhile
        self._sizes[entry] = total
        entry.loading, began = True, time.monotonic()
        try:
            entry.model = await source.load()
        except BaseException:
            del self._sizes[entry]
            raise
        finally:
            entry.loading = False
        entry.client, entry.used = entry.model.client, time.monotonic()
        entry.idle.set()
        level = logging.INFO if entry.waiting else logging.DEBUG  # nobody waits at the start
        LOG.log(level, "%s is loaded in %.1f s, %s", entry.name, entry.used - began, size(total))

    def _check_fits(self, entry: Entry, total: int) -> None:
        """Raises DoesNotFit for a model for which there cannot be room."""
        pinned = sum(each for e, each in self._sizes.items() if e.pinned)
        if total + pinned > self._budget:
            beside = f" + pinned models {size(pinned)}" if pinned else ""
            raise DoesNotFit(
                f"{entry.name} does not fit: {size(total)}{beside} > {size(self._budget)}",
                f"--memory {(total + pinned) // (1 << 20) + 1}MiB",
            )

    async def _victim(self) -> Entry | None:
        """A model to unload: the first that is idle, of several the least recently used.

        None if that is in use again, or pinned: the next look is at what there is then.
        """
        loaded = sorted((e for e in self._sizes if not e.pinned), key=lambda e: e.used)
        if all(e.users for e in loaded):
            loaded[0].leaving = True
            waits = [asyncio.create_task(e.idle.wait()) for e in loaded]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
                loaded[0].leaving = False
        return next((e for e in loaded if not (e.users or e.pinned)), None)

    async def _unload(self, entry: Entry) -> None:
        """Unloads a model: to its end, even if it is cancelled meanwhile."""
        model, source = entry.model, entry.source
        assert model is not None and source is not None
        entry.model = entry.client = None  # at once: nobody gets it any more
        try:
            await to_its_end(source.unload(model))
        finally:
            del self._sizes[entry]
        LOG.info("%s is unloaded", entry.name)

    async def unload(self, entry: Entry) -> None:
        """Unloads a model once it is idle; requests that come meanwhile load it again."""
        async with self._turn:
            if entry.model is None:
                return
            entry.leaving = True
            try:
                await entry.idle.wait()
            finally:
                entry.leaving = False
            await self._unload(entry)

    async def expire(self) -> None:
        """Unloads models that have been idle for `keep_alive` seconds, for ever."""
        while self._keep_alive is not None:
            await asyncio.sleep(max(0.05, self._keep_alive / LOOKS))
            async with self._turn:
                since = time.monotonic() - self._keep_alive
                for entry in list(self._sizes):
                    if not (entry.users or entry.pinned) and entry.used < since:
                        await self._unload(entry)

    async def close(self) -> None:
        """Ends what is being loaded; those who wait for it get an error."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
