"""An event loop on a thread of its own: what it runs ends with it, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo.client.event_loop import EventLoop
from octavo.errors import EngineFailed


async def numbers(count: int) -> AsyncGenerator[int, None]:
    for i in range(count):
        yield i
    raise ValueError("no more")


async def endless() -> AsyncGenerator[int, None]:
    while True:
        yield 0
        await asyncio.sleep(0)


def test_items_come_before_the_error_that_ends_them() -> None:
    loop = EventLoop()
    items = loop.iterate(numbers(3))
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="no more"):
        next(items)
    loop.stop()


def test_an_iteration_ends_that_is_stopped_before_it_begins() -> None:
    """The thread is held up until the iteration and the end are both waiting for it."""
    for _ in range(20):
        loop, gate, errors = EventLoop(), threading.Event(), []

        async def held(gate: threading.Event = gate) -> None:
            gate.wait(10)

        def read(loop: EventLoop = loop, errors: list[str | None] = errors) -> None:
            try:
                list(loop.iterate(endless()))
            except EngineFailed as e:
                errors.append(e.code)

        def hold(loop: EventLoop = loop, gate: threading.Event = gate) -> None:
            loop.run(held(gate))

        threads = [threading.Thread(target=t, daemon=True) for t in (hold, read, loop.stop)]
        for thread in threads:
            thread.start()
            time.sleep(0.01)
        gate.set()
        for thread in threads:
            thread.join(10)
        assert not [thread for thread in threads if thread.is_alive()]
        assert errors == ["engine_closed"]


def test_the_last_work_is_done_once() -> None:
    """Whoever asks for it, from whatever thread, waits for its end."""
    loop, done = EventLoop(), []

    async def work() -> None:
        await asyncio.sleep(0.1)
        done.append(1)

    def finish(_: int) -> int:
        loop.finish(work)
        return len(done)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(finish, range(8), timeout=10)) == [1] * 8
    with pytest.raises(EngineFailed, match="closed"):
        loop.run(work())
