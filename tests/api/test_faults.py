"""Causes from outside: signals, files that go or change, no handles. The server is ready again soon after they end, and
every request has the right answer or a clean error."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from tests.api.server import Server, serving
from tests.api.test_robust import body, stream
from tests.parity.test_lora import make_adapter
from tests.waiting import async_until

READY_AGAIN = 10.0  # seconds after the end of a cause


def ready(server: Server) -> bool:
    return server.get("/health/ready")[0] == 200


async def flowing(server: Server, tokens: int = 1) -> None:
    """Until so many more tokens have come."""
    name = "octavo_generated_tokens_total"
    made = server.metric(name)
    await async_until(lambda: server.metric(name) >= made + tokens)


async def gone(process: psutil.Process) -> None:
    await async_until(lambda: not psutil.pid_exists(process.pid))


async def ready_again(server: Server) -> float:
    """The seconds until then."""
    began = time.monotonic()
    await async_until(lambda: ready(server))
    return time.monotonic() - began


def complete(server: Server, **changes: Any) -> tuple[int, Any]:
    given = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    model = json.loads(server.get("/v1/models")[1])["data"][0]["id"]
    return server.post("/v1/completions", {"model": model} | given | changes)


def test_ten_kills(server: Server) -> None:
    """Streams that live through them, however many, say what they say undisturbed."""

    async def run() -> None:
        before = server.metric("octavo_engine_restarts_total")
        results: list[tuple[str, str | None]] = []
        seconds: list[float] = []
        over = False

        async def sing(client: httpx.AsyncClient) -> None:
            while not over:
                results.append(await stream(client, server.url, body(150)))

        async with httpx.AsyncClient(timeout=120) as client:
            expected = await stream(client, server.url, body(150))
            singers = [asyncio.create_task(sing(client)) for _ in range(3)]
            for _ in range(10):
                await flowing(server, 40)  # nobody is doubted any more
                engine = server.engine()
                engine.kill()
                await gone(engine)
                seconds.append(await ready_again(server))
            over = True
            await asyncio.gather(*singers)
        assert sorted(seconds)[5] < READY_AGAIN
        assert len(results) >= 3 and set(results) == {expected}
        assert server.metric("octavo_engine_restarts_total") == before + 10

    asyncio.run(run())
    server.wait_idle()


def test_a_stopped_engine_is_replaced(server: Server) -> None:
    """A timeout passes by the front's own clock; what has none goes on."""

    async def run() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            expected = await stream(client, server.url, body(100))
            tasks = [asyncio.create_task(stream(client, server.url, body(100))) for _ in range(2)]
            await flowing(server)
            engine = server.engine()
            engine.suspend()
            began = time.monotonic()
            late = await client.post(
                server.url + "/v1/chat/completions", json=body(100, stream=False, timeout=0.5)
            )
            assert 0.5 <= time.monotonic() - began < 5
            assert late.json()["error"]["code"] == "deadline_exceeded"
            await gone(engine)
            assert time.monotonic() - began < READY_AGAIN
            assert await ready_again(server) < READY_AGAIN
            assert await asyncio.gather(*tasks) == [expected] * 2

    asyncio.run(run())
    server.wait_idle()


def test_a_moment_of_rest_is_no_death(server: Server) -> None:
    engine = server.engine()
    engine.suspend()
    time.sleep(0.5)
    engine.resume()
    assert complete(server)[0] == 200 and server.engine().pid == engine.pid


def test_no_handles(server: Server) -> None:
    """Without a handle for its socket no engine can be started; with one again it is."""

    async def run() -> None:
        front = psutil.Process(server.process.pid)
        async with httpx.AsyncClient(timeout=120) as client:
            expected = await stream(client, server.url, body(100))
            task = asyncio.create_task(stream(client, server.url, body(100)))
            await flowing(server)
            engine, limits = server.engine(), resource.prlimit(front.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(front.pid, resource.RLIMIT_NOFILE, (front.num_fds() - 1, limits[1]))
            try:
                engine.kill()
                await gone(engine)
                await asyncio.sleep(2)
                assert not [
                    c for c in front.children() if "octavo.client.engine_process" in c.cmdline()
                ]
            finally:
                resource.prlimit(front.pid, resource.RLIMIT_NOFILE, limits)
            assert await ready_again(server) < READY_AGAIN
            assert await task == expected

    asyncio.run(run())
    server.wait_idle()


@pytest.fixture
def own(smollm2: Path, tmp_path: Path) -> Path:
    """A model file that may be changed."""
    shutil.copyfile(smollm2, tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


def test_a_lost_file_and_its_return(own: Path, tmp_path: Path) -> None:
    """Requests are told at once, without a path; when the file is back, so is the server."""

    async def run(s: Server) -> None:
        expected = complete(s)
        own.rename(tmp_path / "away")
        s.engine().kill()
        await async_until(lambda: complete(s, timeout=20)[0] == 503, 20)
        for _ in range(2):
            status, reply = complete(s)
            assert status == 503 and reply["error"]["code"] == "engine_failed"
            assert reply["error"]["message"] == "a file of the model is gone"
        assert s.get("/health/ready")[0] == 503 and s.get("/health/live")[0] == 200
        (tmp_path / "away").rename(own)
        assert await ready_again(s) < READY_AGAIN
        assert complete(s)[1]["choices"] == expected[1]["choices"]

    with serving(str(own), log=tmp_path / "log") as s:
        asyncio.run(run(s))
    log = (tmp_path / "log").read_text()
    assert log.count("not ready: a file of the model is gone (m.gguf is gone)") == 1


@pytest.mark.parametrize("way", ["replaced", "written"])
def test_a_changed_file_is_not_served(own: Path, tmp_path: Path, way: str) -> None:
    """An engine that came up with other weights would have the wrong tokenizer."""

    async def run(s: Server) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            request = body(1000, model="m")
            expected = complete(s)
            task = asyncio.create_task(stream(client, s.url, request))
            await flowing(s)
            if way == "replaced":
                shutil.copyfile(own, tmp_path / "new")
                (tmp_path / "new").replace(own)
            else:
                with own.open("r+b") as f:
                    f.seek(-1, os.SEEK_END)
                    f.write(b"\x00")
            s.engine().kill()
            text, end = await task
            assert text and end == "engine_failed"
        assert expected[0] == 200
        status, reply = complete(s)
        assert status == 503 and reply["error"]["code"] == "engine_failed"
        assert (
            "files have changed" in reply["error"]["message"]
            and "/" not in reply["error"]["message"]
        )
        assert s.get("/health/ready")[0] == 503 and s.get("/health/live")[0] == 200

    with serving(str(own), log=tmp_path / "log") as s:
        asyncio.run(run(s))
    assert "m.gguf has changed since it was read" in (tmp_path / "log").read_text()


MODULES = {"self_attn.q_proj": (576, 576), "mlp.down_proj": (1536, 576)}


def test_adapters_and_deaths(smollm2: Path, tmp_path: Path) -> None:
    """One is unloaded while a stream uses it, one changes, one goes, one stays; then the engine dies."""
    root = tmp_path / "adapters"
    for i, name in enumerate(("leaves", "changes", "goes", "stays", "odd", "fine")):
        alpha = {"lora_alpha": 10**400} if name == "odd" else {}
        make_adapter(
            root / name, i, rank=4, layers=30, modules=MODULES, dtype=torch.bfloat16, **alpha
        )
    names = ("leaves", "changes", "goes", "stays")

    async def run(s: Server) -> None:
        engine = s.engine()
        status, reply = s.post("/v1/load_lora_adapter", {"lora_name": "odd", "lora_path": "odd"})
        assert status == 400 and s.engine().pid == engine.pid, reply
        async with httpx.AsyncClient(timeout=120) as client:
            each = [body(60, model=n) for n in (*names, "smollm2")]
            expected = await asyncio.gather(*(stream(client, s.url, b) for b in each))
            assert len({text for text, _ in expected}) == 5
            tasks = [asyncio.create_task(stream(client, s.url, b)) for b in each]
            await flowing(s, 20)
            assert s.post("/v1/unload_lora_adapter", {"lora_name": "leaves"})[0] == 200
            assert (
                s.post("/v1/load_lora_adapter", {"lora_name": "leaves", "lora_path": "fine"})[0]
                == 400
            )
            shutil.rmtree(root / "goes")
            (root / "changes" / "adapter_model.safetensors").touch()
            engine.kill()
            await gone(engine)
            assert await ready_again(s) < READY_AGAIN
            leaves, changes, goes, stays, base = await asyncio.gather(*tasks)
        assert [leaves, stays, base] == [expected[0], expected[3], expected[4]]
        for got, whole in ((changes, expected[1]), (goes, expected[2])):
            assert got[1] == "adapter_lost" and whole[0].startswith(got[0])
        served = [m["id"] for m in json.loads(s.get("/v1/models")[1])["data"]]
        assert served == ["smollm2", "stays"]
        s.wait_idle()
        assert (
            s.post("/v1/load_lora_adapter", {"lora_name": "leaves", "lora_path": "fine"})[0] == 200
        )
        assert complete(s, model="leaves")[0] == 200

    options = [f"--lora={n}={root / n}" for n in names]
    log = tmp_path / "log"
    with serving("smollm2", "--offline", *options, "--lora-dir", str(root), log=log) as s:
        asyncio.run(run(s))
    assert "adapter goes is unloaded" in log.read_text()
