"""An event loop on a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import aclosing
from queue import SimpleQueue
from typing import Any, TypeVar

import uvloop

from octavo.client.in_process import EngineThread
from octavo.errors import engine_closed

T = TypeVar("T")


class _LoopThread(threading.Thread):
    """The thread of a loop. A finalizer that happens to run on it must not wait for it."""


class _End:
    """What comes after the last item of an iteration."""


class EventLoop:
    """Runs coroutines for other threads, any number of them. Idle, it uses no processor time."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()  # 0.6 of asyncio's processor time a token
        self._threads = ThreadPoolExecutor(thread_name_prefix="octavo")
        self._loop.set_default_executor(self._threads)
        self._lock = threading.RLock()  # a finalizer may interrupt who holds it
        self._finishing = threading.RLock()
        self._stopped = False
        self._thread = _LoopThread(target=self._run, name="octavo-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which ends with whatever interrupts the caller (Ctrl-C).

        Raises EngineFailed when the loop is stopped.
        """
        future = self._start(work)
        try:
            return future.result()
        except CancelledError:
            raise engine_closed() from None
        finally:
            future.cancel()

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """The items of an asynchronous iterator as they come. Closing this one closes that one."""
        inbox: SimpleQueue[T | _End] = SimpleQueue()

        async def pump() -> None:
            async with aclosing(items):
                async for item in items:
                    inbox.put(item)

        future = self._start(pump())
        future.add_done_callback(lambda _: inbox.put(_End()))  # also when it never begins
        try:
            while not isinstance(item := inbox.get(), _End):
                yield item
            if future.cancelled():
                raise engine_closed()
            future.result()
        finally:
            future.cancel()  # does not wait: a finalizer may close the iterator, on any thread

    def finish(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs the last work, then stops. Whoever calls it meanwhile or later waits for that."""
        with self._finishing:
            if not self._stopped:
                self.run(work())
                self.stop()

    def stop(self) -> None:
        """Cancels what runs and ends the thread. May be called again."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        if not isinstance(threading.current_thread(), EngineThread | _LoopThread):
            self._thread.join()

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if not self._stopped:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise engine_closed()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._threads.shutdown()
        self._loop.close()
