"""One engine process, and the socket that joins it to the front."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import deque
from pathlib import Path
from typing import Any

from octavo.client.protocol import (
    RECEIVE,
    FrameBuffer,
    Profiled,
    StartProfile,
    TakeProfile,
    ToEngine,
    ToFront,
    Working,
    frame,
)
from octavo.client.spawned import Spawned
from octavo.engine.profile import Profile
from octavo.errors import EngineFailed


class EngineLink:
    """Messages to and from a process that has been spawned, and its end."""

    def __init__(self, spawned: Spawned) -> None:
        self._process, self._ours = spawned.process, spawned.sock
        self._writer: asyncio.StreamWriter | None = None
        self._frames: FrameBuffer[ToFront] = FrameBuffer(ToFront)
        self._operations = -1
        self._profiles: deque[asyncio.Future[Profile]] = deque()  # that are asked for
        self.signs = 0  # of its work getting on; they only ever grow
        self.cause = ""  # why it was killed from here
        self.over = False  # its end has been found

    async def open(self) -> None:
        """Joins the socket to the event loop."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._ours)

    @property
    def opened(self) -> bool:
        return self._writer is not None

    def send(self, message: ToEngine) -> None:
        """Sends a message, or nothing to a process that has ended, as `receive` will say. Raises
        ValueError, TypeError or OverflowError for what cannot be sent."""
        data = frame(message)
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(data)

    async def profile(self, work: asyncio.Future[None]) -> Profile:
        """What the process does until `work` is done. Raises EngineFailed if it ends meanwhile."""
        if self.over:
            raise _ended()
        asked: asyncio.Future[Profile] = asyncio.get_running_loop().create_future()
        either: set[asyncio.Future[Any]] = {work, asked}
        self._profiles.append(asked)
        self.send(StartProfile())
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not asked.done():
                self.send(TakeProfile())
        return await asked

    async def receive(self) -> ToFront:
        """The next message. Raises EOFError when the process has ended."""
        while isinstance(message := await self._message(), Profiled):
            asked = self._profiles.popleft()
            if not asked.done():
                asked.set_result(message.profile)
        return message

    async def _message(self) -> ToFront:
        while (message := self._next()) is None:
            try:
                data = await self._reader.read(RECEIVE)
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError
            self._frames.push(data)
        if not isinstance(message, Working) or message.operations != self._operations:
            self.signs += 1
        if isinstance(message, Working):
            self._operations = message.operations
        return message

    def _next(self) -> ToFront | None:
        try:
            return self._frames.pop()
        except ValueError as e:
            raise EOFError(str(e)) from None

    @property
    def pid(self) -> int:
        """The process's."""
        return self._process.pid

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the process; not by a debugger, which has a state of its
        own."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    async def end(self) -> int:
        """Ends the process; gives its exit status, negative for the signal that ended it before."""
        self.over = True
        for asked in self._profiles:
            if not asked.done():
                asked.set_exception(_ended())
                asked.exception()  # who asked may be gone
        if self._writer is not None:
            self._writer.close()
        else:
            self._ours.close()
        try:
            status = await self._status()
        finally:
            self.kill()
            await asyncio.to_thread(self._process.wait)  # much memory takes long to be given back
        return status if status is not None else -signal.SIGKILL

    async def _status(self) -> int | None:
        """How a process that has closed its socket ended, if it does so by itself."""
        for _ in range(20):
            if (status := self._process.poll()) is not None:
                return status
            await asyncio.sleep(0.005)
        return None


def _ended() -> EngineFailed:
    return EngineFailed("the engine ended while it was profiled", code="engine_error")
