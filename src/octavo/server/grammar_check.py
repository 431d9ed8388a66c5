"""Grammars are tried in processes of their own first: a hostile one costs its sender a 400."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
from collections import OrderedDict

import msgspec

from octavo.engine.constraint import TokenTable
from octavo.errors import RequestError
from octavo.process import python_module
from octavo.server.grammar_worker import HEADER, Vocabulary, frame

SECONDS = 5.0
WORKERS = 2  # so that one slow grammar does not hold up the next
VERDICTS = 10_000  # remembered


class GrammarChecker:
    """Says what is wrong with a grammar. Workers start with the first grammar that needs one."""

    def __init__(self, table: TokenTable, vocabulary: int, seconds: float = SECONDS) -> None:
        self._start = msgspec.msgpack.encode(Vocabulary(table, vocabulary))
        self._seconds = seconds
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._idle: list[asyncio.subprocess.Process] = []
        self._slots = asyncio.Semaphore(WORKERS)

    async def check(self, grammar: str) -> None:
        """Raises RequestError for a grammar that cannot be used."""
        key = hashlib.sha256(grammar.encode()).digest()
        if key not in self._verdicts:
            async with self._slots:
                self._verdicts[key] = await self._ask(grammar)
            if len(self._verdicts) > VERDICTS:
                self._verdicts.popitem(last=False)
        if wrong := self._verdicts[key]:
            raise RequestError(wrong, "response_format", "invalid_grammar")

    async def close(self) -> None:
        """Ends the workers."""
        while self._idle:
            await self._kill(self._idle.pop())

    async def _ask(self, grammar: str) -> str:
        worker = self._idle.pop() if self._idle else await self._spawn()
        healthy = False
        try:
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write(frame(grammar.encode()))
            async with asyncio.timeout(self._seconds):
                length = int.from_bytes(await worker.stdout.readexactly(HEADER), "little")
                verdict = (await worker.stdout.readexactly(length)).decode()
            healthy = True
            return verdict
        except TimeoutError:
            return f"the grammar or schema takes over {self._seconds:g} seconds to compile"
        except (asyncio.IncompleteReadError, ConnectionError):
            return "the grammar or schema takes too much memory to compile"
        finally:
            if healthy:
                self._idle.append(worker)
            else:
                await self._kill(worker)

    async def _spawn(self) -> asyncio.subprocess.Process:
        worker = await asyncio.create_subprocess_exec(
            *python_module("octavo.server.grammar_worker"),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        assert worker.stdin is not None
        worker.stdin.write(frame(self._start))
        return worker

    async def _kill(self, worker: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
        await worker.wait()
