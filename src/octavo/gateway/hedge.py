"""Asks a second upstream when the first says nothing for a while; who answers first is heard."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from octavo.balance.retry import RETRYABLE
from octavo.gateway.errors import Exhausted, RolledBack, UpstreamFailed
from octavo.gateway.transport import Answer
from octavo.gateway.upstreams import UpstreamLease

Begun = Response | tuple[Answer, bytes]  # a whole answer, or one that streams and its first bytes


def good(found: Begun) -> bool:
    """Whether it is an answer to pass on."""
    return not isinstance(found, Response) or found.status_code not in RETRYABLE


@dataclass
class Try:
    """A request at an upstream."""

    task: asyncio.Task[Begun]
    lease: UpstreamLease

    @property
    def good(self) -> bool:
        done = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        return done and good(self.task.result())

    async def leave(self) -> bool | None:
        """Ends it, whatever became of it: whether its upstream failed (False), or not (None)."""
        task = self.task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():
            result = None
        elif (error := task.exception()) is not None:
            innocent = not isinstance(error, UpstreamFailed) or isinstance(
                error, RolledBack | Exhausted
            )
            result = None if innocent else False
        else:
            result = None if good(found := task.result()) or found_busy(found) else False
            if not isinstance(found, Response):
                self.lease.upstream.cut.discard(found[0].cut)
                found[0].close()
        self.lease.end(result)
        return result


def found_busy(found: Begun) -> bool:
    """Whether an upstream says that it has enough to do, which is no failure."""
    return isinstance(found, Response) and found.status_code not in (500, 502, 504)


def begin(work: Coroutine[Any, Any, Begun], lease: UpstreamLease) -> Try:
    return Try(asyncio.create_task(work), lease)


async def first_good(tries: list[Try]) -> Try | None:
    """The first that has an answer to pass on; None: all have failed."""
    waiting = {one.task for one in tries}
    while waiting:
        _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in tries:
            if one.good:
                return one
    return None
