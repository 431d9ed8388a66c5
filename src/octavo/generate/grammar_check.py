"""Grammars are made and tried in other processes first: a hostile one costs its sender a 400."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import msgspec

from octavo.engine.constraint import TokenTable
from octavo.errors import Overloaded, RequestError, engine_closed
from octavo.generate.grammar_worker import GrammarVocabulary, Verdict
from octavo.sandbox.worker import PATIENCE, TooCostly, WorkerPool
from octavo.text.structure import Structure

SECONDS = 5.0  # of CPU time
MEMORY = 4 << 30
WORKERS = 2  # so that one slow grammar does not hold up the next
VERDICTS = 10_000  # remembered
CHARACTERS = 16 << 20  # of grammars remembered


class GrammarChecker:
    """Makes the grammars of structures, and says what is wrong with them.

    Only what is a structure's own fault is remembered. Workers start with the first that needs one.
    """

    def __init__(self, table: TokenTable, vocabulary: int, seconds: float = SECONDS) -> None:
        self._vocabulary = GrammarVocabulary(table, vocabulary)
        self._seconds = seconds
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._characters = 0
        # Callers may be on several event loops; a finalizer that closes may interrupt who holds it.
        self._lock = threading.RLock()
        self._threads = ThreadPoolExecutor(WORKERS, "grammar")
        self._pool: WorkerPool | None = None
        self._closed = False

    @property
    def _workers(self) -> WorkerPool:
        with self._lock:
            if self._closed:
                raise engine_closed()
            if self._pool is None:
                about = msgspec.msgpack.encode(self._vocabulary)
                self._pool = WorkerPool(
                    "octavo.generate.grammar_worker", about, seconds=self._seconds, count=WORKERS,
                    memory=MEMORY,
                )  # fmt: skip
            return self._pool

    async def grammar(self, structure: Structure) -> str:
        """The grammar of a structure. Raises RequestError for one that cannot be used, and
        EngineFailed once the checker is closed."""
        task = structure.encode()
        key = hashlib.sha256(task).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._ask(task)
        self._remember(key, verdict)
        if verdict.wrong:
            raise RequestError(verdict.wrong, verdict.param, verdict.code)
        return verdict.grammar

    def close(self) -> None:
        """Ends the workers. Whoever waits gets EngineFailed. May be called again."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=False)  # what waits is refused, which takes no time
        if self._pool is not None:
            self._pool.close()

    async def _ask(self, task: bytes) -> Verdict:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._closed:
                raise engine_closed()
            asked = loop.run_in_executor(self._threads, lambda: self._workers.ask(task))
        try:
            async with asyncio.timeout(PATIENCE):
                answer = await asked
        except TooCostly as e:
            much = {"time": f"over {self._seconds:g} seconds"}.get(str(e), "too much memory")
            wrong = f"the grammar or schema takes {much} to compile"
            return Verdict(wrong=wrong, param="response_format", code="invalid_grammar")
        except TimeoutError:
            raise Overloaded("too many grammars wait; try again", code="overloaded") from None
        return msgspec.msgpack.decode(answer, type=Verdict)

    def _remember(self, key: bytes, verdict: Verdict) -> None:
        with self._lock:
            if known := self._verdicts.pop(key, None):
                self._characters -= len(known.grammar)
            self._verdicts[key] = verdict  # as the latest that was asked for
            self._characters += len(verdict.grammar)
            while len(self._verdicts) > 1 and (
                len(self._verdicts) > VERDICTS or self._characters > CHARACTERS
            ):
                self._characters -= len(self._verdicts.popitem(last=False)[1].grammar)
