"""Clients that vanish, processes that die, and a server that is told to stop."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.api.server import Server, serving

CONCURRENT = 16


def body(tokens: int, **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": "Count upwards from one, in words."}]
    return {
        "model": "smollm2", "messages": messages, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "stream": True,
    } | more  # fmt: skip


async def stream(
    client: httpx.AsyncClient,
    url: str,
    request: dict[str, object],
    leave_after: int | None = None,
    chunks_read: list[int] | None = None,
) -> tuple[str, str | None]:
    """(text, end): the end is a finish reason, an error code, or None for a client that left.

    chunks_read: its last entry counts chunks while they come.
    """
    text, end, chunks = "", None, 0
    async with client.stream("POST", url + "/v1/chat/completions", json=request) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            data = json.loads(line[6:])
            if "error" in data:
                return text, data["error"]["code"]
            choice = data["choices"][0]
            text += choice["delta"].get("content") or ""
            end = choice["finish_reason"] or end
            chunks += 1
            if chunks_read is not None:
                chunks_read[-1] = chunks
            if leave_after is not None and chunks > leave_after:
                return text, None
    return text, end


def prepared(engine: psutil.Process) -> int:
    """Its resident memory once it has prepared what idle engines do (KV blocks ahead of their use,
    a few MB at a time, which takes no 10 ms each): twice the same."""
    before, now = 0, engine.memory_info().rss
    while before != now:
        time.sleep(0.2)
        before, now = now, engine.memory_info().rss
    return now


def test_disconnects_leave_nothing_behind(server: Server) -> None:
    """1,000 requests, one in five leaving at a random point, some before the first token."""
    rng = random.Random(0)
    plan = [rng.randrange(0, 6) if i % 5 == 0 else None for i in range(1000)]
    memory: list[int] = []

    async def one(client: httpx.AsyncClient, gate: asyncio.Semaphore, leave: int | None) -> None:
        async with gate:
            if leave == 0:  # gone while queued or computing, streaming or not
                request = body(1000, stream=rng.random() < 0.5)
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await client.post(server.url + "/v1/chat/completions", json=request)
            else:
                text, end = await stream(client, server.url, body(8), leave)
                assert end == ("length" if leave is None else None)
                assert "1. 1\n2. 1\n3. 1\n4.".startswith(text)

    async def run(part: list[int | None]) -> None:
        gate = asyncio.Semaphore(CONCURRENT)
        async with httpx.AsyncClient(
            timeout=60, limits=httpx.Limits(max_connections=CONCURRENT)
        ) as client:
            await asyncio.gather(*(one(client, gate, leave) for leave in part))

    front, engine = psutil.Process(server.process.pid), server.engine()
    for i in range(0, 1000, 250):
        asyncio.run(run(plan[i : i + 250]))
        server.wait_idle()
        memory.append(front.memory_info().rss + prepared(engine))
    assert server.engine().pid == engine.pid
    assert memory[-1] - memory[1] < 16 << 20  # flat once the first half has warmed everything up
    assert front.num_fds() < 64


def test_killed_engine_is_replaced_and_streams_go_on(server: Server) -> None:
    """Streams that were under way when it was killed end as if nothing had happened."""

    async def run() -> tuple[list[tuple[str, str | None]], list[int], str, float]:
        async with httpx.AsyncClient(timeout=60) as client:
            expected, _ = await stream(client, server.url, body(300))
            counts = [[0] for _ in range(8)]
            tasks = [
                asyncio.create_task(stream(client, server.url, body(300), chunks_read=count))
                for count in counts
            ]
            while not all(count[0] for count in counts):
                await asyncio.sleep(0.005)
            os.kill(server.engine().pid, signal.SIGKILL)
            killed, at_kill = time.monotonic(), [count[0] for count in counts]
            while server.get("/health/ready")[0] == 200:
                await asyncio.sleep(0.005)
            while server.get("/health/ready")[0] != 200:
                await asyncio.sleep(0.01)
            back = time.monotonic() - killed
            return await asyncio.gather(*tasks), at_kill, expected, back

    restarts = server.metric("octavo_engine_restarts_total")
    results, at_kill, expected, back = asyncio.run(run())
    print(f"ready again after {back:.2f} s; chunks before: {at_kill}")
    assert back < 10
    assert all(0 < count < 290 for count in at_kill)
    assert results == [(expected, "length")] * 8
    assert server.metric("octavo_engine_restarts_total") == restarts + 1
    server.wait_idle()


def test_nothing_outlives_a_killed_front(smollm2: Path, tmp_path: Path) -> None:
    with serving("smollm2", "--offline", log=tmp_path / "log") as s:
        engine = s.engine()
        os.kill(s.process.pid, signal.SIGKILL)
        s.process.wait(5)
        psutil.wait_procs([engine], timeout=5)
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", s.port))


def test_sigterm_drains(smollm2: Path, tmp_path: Path) -> None:
    async def run(s: Server) -> tuple[str, str | None]:
        async with httpx.AsyncClient(timeout=60) as client:
            task = asyncio.create_task(stream(client, s.url, body(100)))
            await asyncio.sleep(0.3)
            os.kill(s.process.pid, signal.SIGTERM)
            return await task

    with serving("smollm2", "--offline", log=tmp_path / "log") as s:
        engine = s.engine()
        text, end = asyncio.run(run(s))
        assert end == "length" and text
        assert s.process.wait(10) == 0
        assert not engine.is_running()
    assert (tmp_path / "log").read_text().rstrip().endswith("0 errors; bye")


def test_full_queue_answers_at_once(smollm2: Path, tmp_path: Path) -> None:
    async def run(s: Server) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            tasks = [asyncio.create_task(stream(client, s.url, body(800))) for _ in range(4)]
            while await asyncio.to_thread(s.metric, "octavo_generated_tokens_total") < 400:
                await asyncio.sleep(0.01)
            took = []
            for _ in range(9):
                began = time.monotonic()
                refused = await client.post(s.url + "/v1/chat/completions", json=body(5))
                took.append(time.monotonic() - began)
            assert min(took) < 0.05
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
            told = int(refused.headers["retry-after-ms"]) / 1000
            assert told <= int(refused.headers["retry-after"]) < told + 1
            began = time.monotonic()
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            room = time.monotonic() - began
            assert room / 3 <= told <= 3 * room
            assert {end for _, end in await asyncio.gather(*tasks)} == {"length"}

    with serving("smollm2", "--offline", "--max-queue", "4", log=tmp_path / "log") as s:
        asyncio.run(run(s))


def test_memory_stays_within_the_plan(smollm2: Path, tmp_path: Path) -> None:
    with serving(
        "smollm2", "--offline", "--memory", "400MiB", "--context", "2048", log=tmp_path / "log"
    ) as s:

        async def run() -> None:
            async with httpx.AsyncClient(timeout=120) as client:
                long = [{"role": "user", "content": "word " * 1500}]
                await asyncio.gather(
                    *(stream(client, s.url, body(64, messages=long, seed=i)) for i in range(12))
                )

        asyncio.run(run())
        status = Path(f"/proc/{s.engine().pid}/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) << 10
        assert peak <= 400 << 20


def test_idle_means_idle(server: Server) -> None:
    server.wait_idle()
    time.sleep(0.5)
    processes = [psutil.Process(server.process.pid), server.engine()]
    before = [sum(p.cpu_times()[:2]) for p in processes]
    time.sleep(1.5)
    used = sum(sum(p.cpu_times()[:2]) for p in processes) - sum(before)
    assert used <= 0.05
