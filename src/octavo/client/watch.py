"""Notices an engine process that lives but does not get on, and judges one that has ended."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from octavo.client.link import EngineLink
from octavo.client.replay import SUSPECT
from octavo.errors import EngineFailed, ModelChanged, ModelNotFound, OctavoError

TICK = 1.0  # seconds between looks at the process
STOPPED = 2  # looks in a row that find it stopped by a signal
STOP, RESTART = "stopped", "restarted as asked"  # causes that no request can be
STUCK = 300  # looks in a row between which no operation of a step has begun


async def watch(link: EngineLink, busy: Callable[[], bool]) -> str:
    """Why a process has to be killed: a signal has stopped it, or it does not get on with its work.

    Looks are counted: a front that was held up itself has not looked. What is stopped again and
    again, as cpulimit does, gets on.
    """
    stopped = still = signs = 0
    while True:
        await asyncio.sleep(TICK)
        got_on = link.signs != signs
        stopped = stopped + 1 if link.stopped and not got_on else 0
        still = still + 1 if busy() and not got_on else 0
        signs = link.signs
        if stopped >= STOPPED or still >= STUCK:
            return STOP if stopped >= STOPPED else "stuck"


def verdict(status: int, cause: str) -> tuple[int, str]:
    """How much the end of a process says against the requests it had, and how it ended. status: its
    exit status; cause: why it was killed from here, "" if it was not."""
    killed = status == -signal.SIGKILL and not cause
    doubt = 0 if cause in (STOP, RESTART) else 1 if killed else SUSPECT
    return doubt, cause or (f"signal {-status}" if status < 0 else f"status {status}")


def unavailable(error: OctavoError | None) -> str:
    """What everybody is told of an engine that cannot be started again."""
    return {
        ModelChanged: "the model's files have changed since the server started; it must be "
        "started again to serve them",
        ModelNotFound: "a file of the model is gone",
        EngineFailed: str(error),
    }.get(type(error), "the engine cannot be started again")
