"""Structures tried elsewhere: CPU time counts, only a structure's own fault is remembered."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from octavo.engine.constraint import GrammarCompiler, TokenTable
from octavo.errors import EngineFailed, Overloaded, RequestError
from octavo.generate.grammar_check import GrammarChecker
from octavo.sandbox import worker
from octavo.text.structure import Choice, Grammar, JsonSchema, Regex, Structure
from octavo.text.tools import ToolGrammar

TABLE = TokenTable([bytes([i]) for i in range(256)] + [b"<end>"], [256], [256])
CHAIN = "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(5000)), 'r5000 ::= "x"'])
HOSTILE = {
    "brackets": JsonSchema({"type": "string", "pattern": "[" * 40_000}),
    "fewer brackets": JsonSchema({"type": "string", "pattern": "[" * 4_000}),
    "chain": Grammar(CHAIN), "repeats": JsonSchema({"type": "string", "pattern": "(a{1,1000}){1,1000}"}),
    "enum": JsonSchema({"enum": [f"{i:020}" for i in range(9_999)]}), "choice": Choice([f"{i:020}" for i in range(9_999)]),
    "const": JsonSchema({"const": "x" * 5_000_000}), "half": Regex("\ud800"), "number": JsonSchema({"enum": 5}),
    "text": JsonSchema(text="{" * 100_000),
}  # fmt: skip


def good(i: int) -> Structure:
    return Structure(Choice([f"text {i}"]))


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(TABLE, 257, seconds=1)
    yield checker
    pool = checker._workers
    processes = [w.process for w in pool._all]
    checker.close()
    assert not pool._all
    assert all(p.poll() is not None for p in processes)


def workers(checker: GrammarChecker) -> list[int]:
    return [w.process.pid for w in checker._workers._all]


@pytest.mark.parametrize("name", HOSTILE)
def test_the_loop_goes_on(checker: GrammarChecker, name: str) -> None:
    """All that the thread of the event loop does for a hostile structure takes under 20 ms."""

    async def ask() -> float:
        await checker.grammar(good(0))
        gc.collect()  # what other tests left would else be collected in the time that is taken
        began = time.thread_time()
        try:
            assert (await checker.grammar(Structure(HOSTILE[name]))).startswith("%llguidance")
        except RequestError as e:
            assert (e.status, e.code) in ((400, "invalid_grammar"), (400, "invalid_value"))
            assert len(str(e)) < 300
        return time.thread_time() - began

    assert asyncio.run(ask()) < 0.02


def test_what_takes_too_long_is_remembered() -> None:
    """The worker is ended by its own CPU time; asked again, nothing is tried again."""
    checker = GrammarChecker(TABLE, 257, seconds=0.3)  # a fifth of what the grammar takes

    async def ask() -> None:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        for _ in range(3):
            with pytest.raises(RequestError, match="over 0.3 seconds to compile") as error:
                await checker.grammar(Structure(Grammar(CHAIN.replace("5000", "4000"))))
            assert error.value.status == 400
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert 0.3 <= used < 2.8  # once, and the start of Python
        assert await checker.grammar(good(0))

    asyncio.run(ask())
    checker.close()


def test_time_on_the_wall_is_no_fault(checker: GrammarChecker) -> None:
    """A worker that gets no CPU for longer than its limit still gives the right verdict."""

    async def ask() -> None:
        await checker.grammar(good(0))
        (pid,) = workers(checker)
        os.kill(pid, signal.SIGSTOP)
        verdict = asyncio.create_task(checker.grammar(good(1)))
        await asyncio.sleep(1.5)
        assert not verdict.done()
        os.kill(pid, signal.SIGCONT)
        assert await verdict

    asyncio.run(ask())


def test_without_patience_it_is_the_servers_fault(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        await checker.grammar(good(0))
        (pid,) = workers(checker)
        checker._workers._patience = 0.3
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(Overloaded) as error:
            await checker.grammar(good(1))
        assert error.value.status == 503
        assert not psutil.pid_exists(pid)
        checker._workers._patience = worker.PATIENCE
        assert await checker.grammar(good(1))  # nothing was remembered

    asyncio.run(ask())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_others_ended(checker: GrammarChecker, number: int) -> None:
    """As the system does when memory is short: 503, and nothing is held against the structure."""

    async def ask() -> None:
        await checker.grammar(good(0))
        (pid,) = workers(checker)
        os.kill(pid, signal.SIGSTOP)
        verdict = asyncio.create_task(checker.grammar(good(1)))
        await asyncio.sleep(0.1)
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(Overloaded):
            await verdict
        assert await checker.grammar(good(1))

    asyncio.run(ask())


def test_without_handles(checker: GrammarChecker) -> None:
    """Where no process can be started the client may try again, and then it works."""

    async def ask() -> None:
        with pytest.MonkeyPatch.context() as patch:

            def full(*_: Any, **__: Any) -> None:
                raise OSError(24, "Too many open files")

            patch.setattr(worker.subprocess, "Popen", full)
            handles = psutil.Process().num_fds()
            for _ in range(5):
                with pytest.raises(Overloaded):
                    await checker.grammar(good(0))
            assert psutil.Process().num_fds() == handles
        assert await checker.grammar(good(0))

    asyncio.run(ask())


def test_what_is_remembered_is_bounded(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.generate.grammar_check.CHARACTERS", 2_000)

    async def ask() -> None:
        for i in range(60):
            await checker.grammar(good(i))
            kept = [len(v.grammar) for v in checker._verdicts.values()]
            assert sum(kept) == checker._characters <= 2_000
        assert len(kept) > 10

    asyncio.run(ask())


def test_a_good_one_waits_behind_one_slow_one_only(checker: GrammarChecker) -> None:
    async def ask() -> None:
        slow = asyncio.create_task(checker.grammar(Structure(Grammar(CHAIN))))
        await asyncio.sleep(0)
        for i in range(20):
            assert await checker.grammar(good(i))
        assert not slow.done()
        with pytest.raises(RequestError):
            await slow

    asyncio.run(ask())


def test_closing_answers_whoever_waits() -> None:
    """Those whose grammar compiles, those behind them, and those who come later; no process and
    no cancellation is left of it."""
    checker = GrammarChecker(TABLE, 257)

    async def ask() -> None:
        slow = [Structure(Grammar(CHAIN.replace("5000", str(n)))) for n in (5000, 4999)]
        waiting = [asyncio.create_task(checker.grammar(s)) for s in (*slow, good(0), good(1))]
        while len(checker._workers._all) < 2:
            await asyncio.sleep(0.01)
        pool = checker._workers
        await asyncio.to_thread(checker.close)
        ends = await asyncio.gather(*waiting, checker.grammar(good(2)), return_exceptions=True)
        assert [type(e) for e in ends] == [EngineFailed] * 5
        assert {e.code for e in ends if isinstance(e, EngineFailed)} == {"engine_closed"}
        with pytest.raises(EngineFailed, match="closed"):
            await asyncio.to_thread(pool.ask, b"")
        assert not pool._all
        checker.close()

    asyncio.run(ask())


def test_what_was_never_asked_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr("octavo.generate.grammar_check.WorkerPool", lambda *a, **_: made.append(a))
    GrammarChecker(TABLE, 257).close()
    assert made == []


def test_threads_that_ask_at_once_share_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Pool(worker.WorkerPool):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(self)
            time.sleep(0.05)  # others come meanwhile
            super().__init__(*args, **kwargs)

    monkeypatch.setattr("octavo.generate.grammar_check.WorkerPool", Pool)
    checker = GrammarChecker(TABLE, 257)
    threads = [threading.Thread(target=lambda: checker._workers) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    checker.close()
    assert len(made) == 1


@pytest.mark.parametrize(
    ("arguments", "valid"),
    [
        ('{"n": 1}', True), ('{"n": 1, "next": {"n": 2, "next": {"n": 1}}}', True), ('{"n": 3}', False), ("{}", False),
        ('{"n": 1, "next": {"name": "f", "arguments": {"n": 1}}}', False), ('{"n": 1, "next": {}}', False), ('{"n": 1, "x": 1}', False),
    ],
)  # fmt: skip
def test_a_tree_of_arguments(arguments: str, valid: bool) -> None:
    """`{"$ref": "#"}` is the parameters, not the call around them."""
    schema = {
        "type": "object", "properties": {"n": {"enum": [1, 2]}, "next": {"$ref": "#"}}, "required": ["n"],
    }  # fmt: skip
    lark = ToolGrammar([("f", schema)], "llama3", {}, True, False).lark()
    compiler = GrammarCompiler(TABLE, 257)
    constraint = compiler.constraint(compiler.start(lark))
    text = f'{{"name": "f", "parameters": {arguments}}}'.encode()
    taken = 0
    while taken < len(text) and not constraint.finished and constraint.allows(text[taken]):
        constraint.push(text[taken])
        taken += 1
    assert (taken == len(text) and constraint.finished) == valid
