"""Every engine behind a gateway is replaced while clients stream: what is lost, what is wrong.

    python benchmarks/rolling.py [--requests 2000] [--engines 4] [--clients 16]

Engines are `octavo simulate`, each a process, and texts are known beforehand. All of them are
replaced one after another in each way: `drained` tells the gateway first, `terminated` sends SIGTERM
and `killed` SIGKILL without a word to anybody. Requests that are left over come at the end. Exits
with 1 if a request failed, or had another text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from octavo.simulate.server import Simulated, SimulatedAnswer

WAYS = ("drained", "terminated", "killed")
TOKENS, STEP = 32, "5"  # of an answer; milliseconds of each
FULL = 4  # requests that an engine has before it is replaced
QUICK = ("--probe-interval", "0.2", "--connect-timeout", "1", "--routing", "least-load")


@dataclass
class Lot:
    """What became of the requests that began while engines were replaced in one way."""

    seconds: float = 0.0
    first: list[float] = field(default_factory=list)  # seconds to the first token
    begun: int = 0  # that have not ended
    failed: int = 0
    wrong: int = 0
    said: str = ""  # of the first that failed or was wrong

    def row(self, way: str, failovers: float) -> str:
        cuts = [1e3 * cut for cut in statistics.quantiles((self.first or [0.0]) * 2, n=100)]
        asked = len(self.first) + self.failed
        return (
            f"{way:<12}{self.seconds:8.1f}{asked:10,}{self.failed:8}{self.wrong:7}"
            f"{failovers:11.0f}{cuts[49]:10.1f}{cuts[98]:9.1f}"
        )


@asynccontextmanager
async def process(does: str, port: int, *arguments: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    one = start(does, port, *arguments)
    try:
        yield one
    finally:
        one.kill()
        one.wait()


def start(does: str, port: int, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "octavo.cli.main", does, "--port", str(port), *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Run:
    """engines: processes by their ports. lot: of the requests that begin now."""

    def __init__(self, session: aiohttp.ClientSession, url: str, requests: int) -> None:
        self._session, self._url = session, url
        self._requests = requests
        self.engines: dict[int, subprocess.Popen[bytes]] = {}
        self.lot = Lot()
        self._number = 0
        self.replaced = False

    async def upstreams(self, action: str = "", **body: str) -> dict[str, Any]:
        """Upstreams by name, after an action on one of them."""
        url = f"{self._url}/v1/upstreams{action}"
        asked = self._session.post(url, json=body) if body else self._session.get(url)
        async with asked as response:
            assert response.status == 200, await response.text()
            return {up["id"]: up for up in (await response.json())["upstreams"]}

    async def until(self, port: int, **state: Any) -> None:
        """Waits for an engine to be in a state."""
        while True:
            up = (await self.upstreams())[f"127.0.0.1:{port}"]
            if all(up[name] == value for name, value in state.items()):
                return
            await asyncio.sleep(0.02)

    async def metric(self, name: str) -> float:
        async with self._session.get(f"{self._url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    async def client(self) -> None:
        """Asks until there were enough and every engine has been replaced."""
        while self._number < self._requests or not self.replaced:
            self._number += 1
            lot = self.lot
            lot.begun += 1
            try:
                await self.ask(f"request {self._number}", lot)
            finally:
                lot.begun -= 1

    async def ask(self, prompt: str, lot: Lot) -> None:
        body = {"model": "simulated", "prompt": prompt, "max_tokens": TOKENS, "stream": True}
        wanted = json.loads(SimulatedAnswer(Simulated(), False, body).whole())["choices"][0]["text"]
        began, first, said, done = time.perf_counter(), 0.0, "", False
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise ValueError(f"{response.status} {(await response.text())[:200]}")
                async for line in response.content:
                    first = first or time.perf_counter() - began
                    if line == b"data: [DONE]\n":
                        done = True
                    elif line.startswith(b"data: "):
                        said += json.loads(line[6:])["choices"][0]["text"]
            if not done:
                raise ValueError("the stream has no end")
        except (aiohttp.ClientError, ValueError, KeyError, TimeoutError) as e:
            lot.failed, lot.said = lot.failed + 1, lot.said or f"{type(e).__name__}: {e}"
            return
        lot.first.append(first)
        if said != wanted:
            lot.wrong += 1
            lot.said = lot.said or f"said {said!r}, not {wanted!r}"

    async def replace(self, port: int, way: str) -> None:
        """Another process takes an engine's place, once there is something to lose."""
        old, name = self.engines[port], f"127.0.0.1:{port}"
        with suppress(TimeoutError):  # of a load that is too small for all of them
            async with asyncio.timeout(2):
                while (await self.upstreams())[name]["running"] < FULL:
                    await asyncio.sleep(0.005)
        if way == "drained":
            await self.upstreams("/drain", upstream=name)
            await self.until(port, running=0, waiting=0)
        old.send_signal(signal.SIGKILL if way == "killed" else signal.SIGTERM)
        await asyncio.to_thread(old.wait)
        if way == "drained":
            await self.upstreams("/remove", upstream=name)
        self.engines[port] = start("simulate", port, "--step", STEP)
        if way == "drained":
            await self.upstreams("", upstream=f"http://{name}")
        else:
            await self.until(port, state="down")
        await self.until(port, state="up")


async def measure(requests: int, engines: int, clients: int, ways: list[str]) -> int:
    """The number of requests that failed or had another text."""
    ports, door = [free_port() for _ in range(engines)], free_port()
    named = [text for port in ports for text in ("--upstream", f"http://127.0.0.1:{port}")]
    limit = aiohttp.ClientTimeout(total=60)
    lost = 0
    async with aiohttp.ClientSession(timeout=limit) as session:
        run = Run(session, f"http://127.0.0.1:{door}", requests)
        run.engines = {port: start("simulate", port, "--step", STEP) for port in ports}
        try:
            async with process("gateway", door, *named, *QUICK):
                await answered(session, f"http://127.0.0.1:{door}/health/ready")
                for port in ports:
                    await run.until(port, state="up")
                print(f"{'':<12}{'seconds':>8}{'requests':>10}{'failed':>8}{'wrong':>7}"
                      f"{'failovers':>11}{'TTFT p50':>10}{'p99 ms':>9}")  # fmt: skip
                asking = [asyncio.create_task(run.client()) for _ in range(clients)]
                for way in [*ways, "none"]:
                    lost += await replaced(run, way, ports, asking)
        finally:
            for engine in run.engines.values():
                engine.kill()
                engine.wait()
    return lost


async def replaced(run: Run, way: str, ports: list[int], asking: list[asyncio.Task[None]]) -> int:
    """Replaces all engines in a way, `none` waits for the rest; how many requests were lost."""
    lot, began = run.lot, time.perf_counter()
    before = await run.metric("octavo_upstream_failovers_total")
    if way == "none":
        run.replaced = True
        await asyncio.gather(*asking)
    else:
        for port in ports:
            await run.replace(port, way)
    run.lot = Lot()
    lot.seconds = time.perf_counter() - began
    failovers = await run.metric("octavo_upstream_failovers_total") - before
    while lot.begun:
        await asyncio.sleep(0.01)
    print(lot.row(way, failovers), flush=True)
    if lot.said:
        print(f"  {lot.said}")
    return lot.failed + lot.wrong


async def answered(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(60):
        while True:
            with suppress(aiohttp.ClientError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # children import no file of the current folder
    lost = asyncio.run(measure(options.requests, options.engines, options.clients, options.ways))
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
