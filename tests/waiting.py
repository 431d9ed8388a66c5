"""Waits until something happens, for as long as that may take beside much other work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

SECONDS = 90.0


def _pauses(seconds: float) -> Iterator[float]:
    """Seconds between looks, longer ones later. Raises AssertionError in the end."""
    deadline, pause = time.monotonic() + seconds, 0.001
    while time.monotonic() < deadline:
        yield pause
        pause = min(2 * pause, 0.05)
    raise AssertionError(f"not within {seconds} s")


def until(happened: Callable[[], object], seconds: float = SECONDS) -> None:
    """Asks until it is true. Raises AssertionError if that takes too long."""
    pauses = _pauses(seconds)
    while not happened():
        time.sleep(next(pauses))


async def async_until(happened: Callable[[], object], seconds: float = SECONDS) -> None:
    """`until`, in an event loop that goes on meanwhile."""
    pauses = _pauses(seconds)
    while not happened():
        await asyncio.sleep(next(pauses))
