"""Work that goes on when its request has been answered."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of work that is never cut off: who is cancelled meanwhile waits for its end."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


class Background:
    """Tasks by the ids of what they make."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def start(self, id: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._running[id] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._running.pop(id, None))
        return task

    async def end(self, id: str) -> bool:
        """Cancels a task. Whether it was still running."""
        if (task := self._running.get(id)) is None:
            return False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    async def close(self) -> None:
        """Cancels all."""
        for id in list(self._running):
            await self.end(id)
