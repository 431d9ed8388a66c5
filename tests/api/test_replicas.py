"""Two engine processes as one client: requests find their prefixes, and survive what happens to an
engine, with the texts that they would have had without it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from click.testing import CliRunner

from octavo.cli.replica import replica, route
from octavo.client.process import EngineProcessClient
from octavo.client.replicas import Replicas, ReplicaTimes
from octavo.client.routes import Decision
from octavo.client.spawned import ENGINE
from octavo.engine.constraint import TokenTable
from octavo.engine.open import open_model
from octavo.engine.plan import Plan, make_plan
from octavo.engine.request import Request
from octavo.errors import (
    DoesNotFit,
    EngineFailed,
    InvalidValue,
    Overloaded,
    RequestError,
    UsageError,
)
from tests.api.poisoned_engine import POISON
from tests.api.server import Server, serving
from tests.api.test_replay import ROOT, Answer, ask, neighbours, request
from tests.parity.test_lora import make_adapter
from tests.small_models import Small, save_hf
from tests.waiting import until

STREAMS = 16
LENGTH = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_hf(Small(), path)
    return path


@asynccontextmanager
async def replicas_of(
    folder: Path, count: int = 2, module: str = ENGINE, policy: str = "cost", adapters: int = 0
) -> AsyncGenerator[Replicas, None]:
    model = open_model(folder, adapters > 0)
    plan = make_plan(model.compiled, name="m", context=512, threads=1, adapters=adapters)
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


async def begun(pool: Replicas, *names: str) -> str:
    """Waits until one of some replicas has given some tokens; returns its name."""
    async with asyncio.timeout(60):
        while True:
            for name in names:
                if any(len(s.given) > 3 for s in engine(pool, name).streams):
                    return name
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


def test_who_has_a_replica_restarted_is_told_why_there_is_no_new_engine(tmp_path: Path) -> None:
    """Its model has been replaced."""
    save_hf(Small(), tmp_path)
    (weights,) = tmp_path.glob("*.safetensors")

    async def run() -> None:
        async with replicas_of(tmp_path) as pool:
            os.utime(weights, ns=(1, 1))
            with pytest.raises(Overloaded, match="files have changed") as refused:
                await asyncio.wait_for(pool.restart("1", 0), 20)
            assert (refused.value.code, pool.states) == ("engine_failed", {"0": "up", "1": "down"})

    asyncio.run(run())


def test_who_has_a_replica_restarted_is_told_that_all_end(folder: Path) -> None:
    async def run() -> None:
        async with replicas_of(folder) as pool:
            asked = asyncio.create_task(pool.restart("1", 0))
            while pool.states["1"] != "down":
                await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            await asyncio.wait_for(asked, 20)
        assert refused.value.code == "shutting_down"

    asyncio.run(run())


def decisions(pool: Replicas) -> list[Decision]:
    return list(pool.routes)


def test_requests_go_where_their_prefix_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of engines that take the same times: an engine that others slow down may cost more than it."""
    same = ReplicaTimes(0.001, 0.001, 0.0)
    monkeypatch.setattr(ReplicaTimes, "of", staticmethod(lambda stats: same))
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


def test_a_poisonous_request_ends_alone(
    folder: Path, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POISON", f"{int(signal.SIGABRT)}:25")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")

    async def run() -> tuple[Answer, list[Answer]]:
        async with replicas_of(folder, module="tests.api.poisoned_engine") as pool:
            bad = asyncio.create_task(ask(pool, request("bad", [*POISON, 5])))
            answers = await asyncio.gather(*(ask(pool, r) for r in streams()))
            return await bad, answers

    bad, answers = asyncio.run(run())
    assert answers == expected
    assert isinstance(bad.error, EngineFailed) and bad.error.code == "engine_error"


def test_every_engine_has_the_adapters(folder: Path, tmp_path: Path) -> None:
    """Also one that takes the place of another, and streams that move."""
    path = make_adapter(tmp_path / "a", 1, modules={"self_attn.q_proj": (64, 64)})
    asked = [msgspec.structs.replace(r, adapter="a") for r in streams()[:6]]

    async def run() -> None:
        async with replicas_of(folder, adapters=16 << 20) as pool:
            with pytest.raises(RequestError, match="no adapter 'a'"):
                await anext(pool.submit(asked[0]))
            await pool.load_adapter("a", str(path))
            assert pool.adapters == ["a"] and pool.adapter_paths == {"a": str(path)}
            wanted = await asyncio.gather(*(ask(pool, r) for r in asked))
            plain = await ask(pool, streams()[0])
            assert wanted[0] != plain
            assert {d.route.replica for d in decisions(pool)} == {"0", "1"}
            tasks = [asyncio.create_task(ask(pool, r)) for r in asked]
            killed = await begun(pool, "0", "1")
            os.kill(pid(pool, killed), signal.SIGKILL)
            assert await asyncio.gather(*tasks) == wanted
            async with asyncio.timeout(60):
                while pool.states[killed] != "up":
                    await asyncio.sleep(0.01)
            assert engine(pool, killed).adapters == ["a"]
            with pytest.raises(RequestError, match="loaded already"):
                await pool.load_adapter("a", str(path))
            await pool.unload_adapter("a")
            assert pool.adapters == []

    asyncio.run(run())


def test_policies_change_no_texts(folder: Path, expected: list[Answer]) -> None:
    async def run() -> set[str]:
        async with replicas_of(folder, policy="round-robin") as pool:
            assert await asyncio.gather(*(ask(pool, r) for r in streams())) == expected
            return {d.route.replica for d in decisions(pool)}

    assert asyncio.run(run()) == {"0", "1"}


# -- a server -----------------------------------------------------------------------------------

ADMIN = {"authorization": "Bearer adm"}


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--replicas", "2", "--admin-key", "adm", "--context", "1024", "--memory", "1GiB")
    log = tmp_path_factory.mktemp("replicas") / "log"
    with serving("smollm2", "--offline", *options, log=log) as s:
        yield s


def said(server: Server, number: int) -> str:
    body = {"model": "smollm2", "prompt": f"Count: {number},", "max_tokens": 48, "temperature": 0}
    status, reply = server.post("/v1/completions", body)
    assert status == 200, reply
    text: str = reply["choices"][0]["text"]
    return text


def cards(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(server.get("/v1/replicas", ADMIN)[1])["data"]
    return found


def test_a_server_loses_no_request_with_an_engine(server: Server) -> None:
    """Each of its engines is killed while all clients wait."""
    wanted = [said(server, i) for i in range(8)]
    with ThreadPoolExecutor(8) as clients:
        for name in (0, 1):
            before = cards(server)
            asked = [clients.submit(said, server, i) for i in range(8)]
            until(lambda name=name: cards(server)[name]["running"])
            os.kill(before[name]["pid"], signal.SIGKILL)
            assert [one.result() for one in asked] == wanted
            until(lambda name=name: cards(server)[name]["state"] == "up")
            assert cards(server)[name]["restarts"] == before[name]["restarts"] + 1
    for name in ("0", "1"):
        assert server.metric("octavo_engine_restarts_total", replica=name) == 1
    server.wait_idle()


def test_admins_drain_and_restart_replicas(server: Server) -> None:
    def run(*words: str, key: str = "adm") -> tuple[int, str]:
        done = CliRunner().invoke(replica, [*words, "--server", server.url, "--admin-key", key])
        return done.exit_code, done.output + str(done.exception or "")

    assert server.get("/v1/replicas")[0] == 401
    assert "admin" in run("list", key="wrong")[1]
    assert run("drain", "0")[0] == 0
    assert [c["state"] for c in cards(server)] == ["draining", "up"]
    assert "no replica but 1 takes requests" in run("drain", "1")[1]
    assert "no replica '5'; there are 0, 1" in run("resume", "5")[1]
    said(server, 100)
    assert json.loads(server.get("/v1/routes", ADMIN)[1])["data"][-1]["replica"] == "1"
    old = cards(server)[0]["pid"]
    assert run("restart", "0", "--seconds", "1")[0] == 0
    assert [c["state"] for c in cards(server)] == ["up", "up"] and cards(server)[0]["pid"] != old
    assert not psutil.pid_exists(old)


def test_it_says_why_a_request_went_where_it_went(server: Server) -> None:
    said(server, 7)
    words = ["explain", "--last", "1", "--server", server.url, "--admin-key", "adm", "--json"]
    (made,) = json.loads(CliRunner().invoke(route, words).output)
    assert made["why"] == "cost" and made["prompt_tokens"] > 3
    costs = {c["replica"]: c["cost"] for c in made["candidates"]}
    assert set(costs) == {"0", "1"} and set(costs["0"]) == {"queue", "prefill", "images", "decode", "cached"}  # fmt: skip
    shown = CliRunner().invoke(route, words[:-1]).output
    assert "← cost" in shown and "prefill" in shown


def test_replicas_divide_memory_and_threads(folder: Path) -> None:
    """What does not fit is refused with numbers."""
    compiled = open_model(folder).compiled

    def plan(replicas: int, memory: str = "1GiB") -> Plan:
        return make_plan(compiled, name="m", memory=memory, threads=5, replicas=replicas)

    one, two = plan(1), plan(2)
    assert (one.threads, two.threads) == (5, 2)
    assert two.total <= 1 << 29 < one.total <= 1 << 30
    with pytest.raises(UsageError, match="--replicas 6 takes 6 threads; there are 5"):
        plan(6)
    with pytest.raises(DoesNotFit, match="> 102 MiB, which is what each of 5 replicas has") as e:
        plan(5, "512MiB")
    assert "--replicas 4" in e.value.suggestions
