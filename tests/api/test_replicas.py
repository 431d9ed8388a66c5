"""Two engine processes as one client: requests find their prefixes, and survive what happens to an
engine, with the texts that they would have had without it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from octavo.client.process import EngineProcessClient
from octavo.client.replicas import Replicas
from octavo.client.routes import Decision
from octavo.client.spawned import ENGINE
from octavo.engine.constraint import TokenTable
from octavo.engine.loader import open_model
from octavo.engine.plan import make_plan
from octavo.engine.request import Request
from octavo.errors import EngineFailed, InvalidValue
from tests.api.poisoned_engine import POISON
from tests.api.test_replay import ROOT, Answer, ask, neighbours, request
from tests.small_models import Small, save_hf

STREAMS = 16
LENGTH = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_hf(Small(), path)
    return path


@asynccontextmanager
async def replicas_of(
    folder: Path, count: int = 2, module: str = ENGINE, policy: str = "cost"
) -> AsyncGenerator[Replicas, None]:
    model = open_model(folder)
    plan = make_plan(model.compiled, name="m", context=512, threads=1)
    files = model.checkpoint.states
    pool = Replicas(
        [EngineProcessClient(str(folder), plan, 320, files=files, module=module) for _ in range(count)],
        policy,
    )  # fmt: skip
    pool.use(TokenTable([], [], [2]))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def streams() -> list[Request]:
    """Sixteen, one of them a beam search."""
    more = [request(f"s{i}", [20 + i] * (5 + 9 * i), max_tokens=LENGTH) for i in range(STREAMS - 1)]
    return [*more, neighbours()[-1]]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Answer]:
    """What the streams get of one engine that nothing happens to."""

    async def run() -> list[Answer]:
        async with replicas_of(folder, 1) as pool:
            return await asyncio.gather(*(ask(pool, r) for r in streams()))

    return asyncio.run(run())


def engine(pool: Replicas, name: str) -> EngineProcessClient:
    found = pool.engines[name]
    assert isinstance(found, EngineProcessClient)
    return found


def pid(pool: Replicas, name: str) -> int:
    found = engine(pool, name).pid
    assert found is not None
    return found


async def begun(pool: Replicas, name: str) -> None:
    """Waits until a replica has given some tokens."""
    async with asyncio.timeout(60):
        while not any(len(s.given) > 3 for s in engine(pool, name).streams):
            await asyncio.sleep(0.001)


async def answers_while(pool: Replicas, happens: Callable[[], object]) -> list[Answer]:
    tasks = [asyncio.create_task(ask(pool, r)) for r in streams()]
    await begun(pool, "0")
    happens()
    return await asyncio.gather(*tasks)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_streams_go_on_when_an_engine_is_gone(
    folder: Path, expected: list[Answer], sent: signal.Signals
) -> None:
    async def run() -> None:
        async with replicas_of(folder) as pool:
            victim = pid(pool, "0")
            answers = await answers_while(pool, lambda: os.kill(victim, sent))
            assert answers == expected and all(a.error is None for a in answers)
            async with asyncio.timeout(60):
                while pool.states != {"0": "up", "1": "up"}:
                    await asyncio.sleep(0.01)
            assert pool.stats["restarts"] == 1 and pid(pool, "0") != victim
            again = await asyncio.gather(*(ask(pool, r) for r in streams()))
            assert again == expected
            assert [len(e.streams) for e in (engine(pool, "0"), engine(pool, "1"))] == [0, 0]

    asyncio.run(run())


def test_streams_go_on_when_all_engines_are_killed(folder: Path, expected: list[Answer]) -> None:
    async def run() -> list[Answer]:
        async with replicas_of(folder) as pool:
            pids = [pid(pool, name) for name in pool.engines]
            return await answers_while(pool, lambda: [os.kill(p, signal.SIGKILL) for p in pids])

    assert asyncio.run(run()) == expected


def test_a_replica_is_drained_restarted_and_used_again(
    folder: Path, expected: list[Answer]
) -> None:
    """Streams that last longer than it is waited for go on at the other."""

    async def run() -> None:
        async with replicas_of(folder) as pool:
            old = pid(pool, "1")
            tasks = [asyncio.create_task(ask(pool, r)) for r in streams()]
            await begun(pool, "1")
            await pool.drain("1", 0)
            assert pool.states == {"0": "up", "1": "draining"}
            assert not engine(pool, "1").streams and engine(pool, "0").streams
            with pytest.raises(InvalidValue, match="no replica but 0 takes requests"):
                await pool.drain("0", 0)
            assert await asyncio.gather(*tasks) == expected
            await ask(pool, request("x", [7] * 40))
            assert pid(pool, "1") == old and not engine(pool, "1").stats["running"]
            await pool.restart("1", 5)
            assert pool.states == {"0": "up", "1": "up"} and pid(pool, "1") != old
            with pytest.raises(InvalidValue, match="no replica '7'; there are 0, 1"):
                pool.resume("7")
            assert await asyncio.gather(*(ask(pool, r) for r in streams())) == expected

    asyncio.run(run())


def test_every_replica_is_restarted_under_load(folder: Path, expected: list[Answer]) -> None:
    async def run() -> None:
        async with replicas_of(folder) as pool:
            over = asyncio.Event()

            async def load(asked: Request) -> list[Answer]:
                found = [await ask(pool, asked)]
                while not over.is_set():
                    found.append(await ask(pool, asked))
                return found

            tasks = [asyncio.create_task(load(r)) for r in streams()]
            await begun(pool, "0")
            before = [pid(pool, name) for name in pool.engines]
            for name in pool.engines:
                await pool.restart(name, 0.2)
            over.set()
            for answers, right in zip(await asyncio.gather(*tasks), expected, strict=True):
                assert answers == [right] * len(answers)
            assert not set(before) & {pid(pool, name) for name in pool.engines}

    asyncio.run(run())


def decisions(pool: Replicas) -> list[Decision]:
    return list(pool.routes)


def test_requests_go_where_their_prefix_is(folder: Path) -> None:
    prefixes = [[30 + i] * 96 for i in range(4)]

    async def run() -> None:
        async with replicas_of(folder) as pool:
            first = [request(f"a{i}", prefix) for i, prefix in enumerate(prefixes)]
            await asyncio.gather(*(ask(pool, r) for r in first))
            homes = [d.route.replica for d in decisions(pool)]
            assert set(homes) == {"0", "1"}
            for i in (3, 1, 2, 0):
                await ask(pool, request(f"b{i}", [*prefixes[i], 5, 6], max_tokens=2))
                made = decisions(pool)[-1]
                assert (made.route.replica, made.route.cost.cached) == (homes[i], 96)
                assert {c.replica: c.cost.cached for c in made.candidates}[homes[i]] == 96
            assert pool.stats["cached_tokens"] == 4 * 96
            await ask(pool, request("s", [*prefixes[0], 5], max_tokens=2))
            salted = request("t", [*prefixes[0], 5], max_tokens=2)
            await ask(pool, Request(id="t", prompt=salted.prompt, params=salted.params, salt="x"))
            assert [d.route.cost.cached for d in decisions(pool)[-2:]] == [96, 0]
            os.kill(pid(pool, homes[0]), signal.SIGKILL)  # what it held is gone with it
            while pool.states[homes[0]] == "up":
                await asyncio.sleep(0.01)
            await ask(pool, request("c", [*prefixes[0], 5], max_tokens=2))
            made = decisions(pool)[-1]
            assert made.route.replica != homes[0] and made.route.cost.cached == 0

    asyncio.run(run())


@pytest.mark.parametrize("way", [int(signal.SIGABRT), int(signal.SIGKILL)], ids=["abort", "kill"])
def test_a_poisonous_request_ends_alone(
    folder: Path, expected: list[Answer], way: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POISON", f"{way}:25")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")

    async def run() -> tuple[Answer, list[Answer]]:
        async with replicas_of(folder, module="tests.api.poisoned_engine") as pool:
            bad = asyncio.create_task(ask(pool, request("bad", [*POISON, 5])))
            answers = await asyncio.gather(*(ask(pool, r) for r in streams()))
            return await bad, answers

    bad, answers = asyncio.run(run())
    assert answers == expected
    assert isinstance(bad.error, EngineFailed) and bad.error.code == "engine_error"


def test_every_policy_gives_the_same_texts(folder: Path, expected: list[Answer]) -> None:
    async def run(policy: str) -> set[str]:
        async with replicas_of(folder, policy=policy) as pool:
            assert await asyncio.gather(*(ask(pool, r) for r in streams())) == expected
            return {d.route.replica for d in decisions(pool)}

    assert [asyncio.run(run(p)) for p in ("round-robin", "least-load")] == [{"0", "1"}] * 2
