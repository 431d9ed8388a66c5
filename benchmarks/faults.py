"""Faults by which gateways are compared: how many of 800 requests are lost, how many texts wrong.

    python benchmarks/faults.py [--rows F02 F16] [--requests 800] [--clients 8] [--model MODEL]

Rows are those of docs/gateway.md. Engines are `octavo simulate`, with --model MODEL `octavo serve`:
real ones, which F04 is about (a server's front process is killed, its engine has to go, too). Half of the requests are streamed; each answer is compared with what an engine alone said
to the same before. Faults come while requests run, evenly among them. "lost": the answer is broken
off or never came; "refused": an error of the API in its place, which a client may repeat. Exits
with 1 if a text was wrong, or a request was lost that the row does not allow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from rolling import answered, free_port, start

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.api import faulty

Process = subprocess.Popen[bytes]
Fault = Callable[[int], Awaitable[float | None]]
PROMPTS, TOKENS = 16, 60  # that are asked; of an answer
STEP = 0.01  # seconds of a token of a simulated engine
STOPPED = 30.0  # seconds that an engine is stopped for
QUICK = (
    "--probe-interval", "0.2", "--connect-timeout", "1", "--first-token-timeout", "5",
    "--idle-timeout", "2", "--total-timeout", "20", "--queue-timeout", "60",
    "--routing", "round-robin", "--admin-key", "admin",
)  # fmt: skip
ADMIN = {"authorization": "Bearer admin"}


@dataclass
class Tally:
    """What became of requests. recovery: seconds from each fault until all was as before, or (F06)
    the engine was left out. orphans: processes that a killed front has left behind."""

    done: int = 0
    lost: int = 0
    refused: int = 0
    wrong: int = 0
    faults: int = 0
    orphans: int = 0
    recovery: list[float] = field(default_factory=list)
    said: str = ""  # of the first that was not answered


@dataclass
class Bed:
    """Engines by their ports, the gateway before them, and the load. model: a real one."""

    session: aiohttp.ClientSession
    requests: int
    model: str | None
    engines: dict[int, Process] = field(default_factory=dict)
    golden: list[str] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    open: bool = False  # the gateway takes requests

    async def begin(self, engines: int) -> None:
        self.port, ports = free_port(), [free_port() for _ in range(engines)]
        self.engines = {port: self.engine(port) for port in ports}
        for port in ports:
            await answered(self.session, f"http://127.0.0.1:{port}/health/ready")
        self.golden = [await self.ask(ports[0], i, False) for i in range(PROMPTS)]
        self.gateway = self.door()
        for port in ports:
            await self.until(port, "up")

    def engine(self, port: int) -> Process:
        if self.model is None:
            return start("simulate", port, "--step", f"{1e3 * STEP:g}")
        return start("serve", port, self.model, "--name", "simulated")

    def door(self) -> Process:
        named = [w for p in self.engines for w in ("--upstream", f"http://127.0.0.1:{p}")]
        return start("gateway", self.port, *named, *QUICK)

    def end(self) -> None:
        for one in (self.gateway, *self.engines.values()):
            one.send_signal(signal.SIGCONT)
            one.send_signal(signal.SIGTERM)
        for one in (self.gateway, *self.engines.values()):
            with suppress(Exception):
                one.wait(10)
            one.kill()
            one.wait()

    async def admin(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}{path}"
        async with self.session.request(method, url, json=body, headers=ADMIN) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def until(self, port: int, state: str) -> None:
        """Waits for an engine to be in a state at the gateway, which may be starting."""
        async with asyncio.timeout(300):
            while True:
                with suppress(aiohttp.ClientError, AssertionError):
                    ups = (await self.admin("GET", "/v1/upstreams"))["upstreams"]
                    if {f"127.0.0.1:{port}": state}.items() <= {
                        u["id"]: u["state"] for u in ups
                    }.items():
                        self.open = True
                        return
                await asyncio.sleep(0.02)

    async def ask(self, port: int, number: int, stream: bool) -> str:
        """The text of an answer. Raises what went wrong."""
        body = {"model": "simulated", "prompt": f"Question {number}: why", "stream": stream,
                "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}  # fmt: skip
        url = f"http://127.0.0.1:{port}/v1/completions"
        async with self.session.post(url, json=body) as response:
            raw = await response.read()
            if response.status in (408, 429, 502, 503, 504):
                raise ConnectionRefusedError(f"{response.status} {raw[:200]!r}")
            if response.status != 200:
                raise ValueError(f"{response.status} {raw[:200]!r}")
        if not stream:
            return json.loads(raw)["choices"][0]["text"]
        if not raw.endswith(b"data: [DONE]\n\n"):
            raise ValueError(f"the stream has no end: {raw[-120:]!r}")
        events = [json.loads(e[6:]) for e in raw.split(b"\n\n")[:-2] if e.startswith(b"data: ")]
        return "".join(e["choices"][0]["text"] for e in events if e.get("choices"))

    async def client(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            while not self.open:  # somebody else would be asked
                await asyncio.sleep(0.02)
            tally = self.tally
            try:
                said = await self.ask(self.port, number % PROMPTS, number % 2 == 0)
                tally.wrong += said != self.golden[number % PROMPTS]
            except ConnectionRefusedError as e:
                tally.refused, tally.said = tally.refused + 1, tally.said or str(e)
            except (aiohttp.ClientError, ValueError, KeyError, TimeoutError, OSError) as e:
                tally.lost, tally.said = tally.lost + 1, tally.said or f"{type(e).__name__}: {e}"
            tally.done += 1

    async def times(self, often: int, fault: Fault) -> None:
        """A fault so often, evenly among the requests, and how long each was felt, which is until
        it has returned unless it says so."""
        for i in range(often):
            while self.tally.done < (i + 0.5) * self.requests / often:
                await asyncio.sleep(0.005)
            began = time.monotonic()
            felt = await fault(i)
            self.tally.faults += 1
            self.tally.recovery.append(felt or time.monotonic() - began)

    # -- faults -----------------------------------------------------------------------------------

    async def replace(self, port: int, sig: signal.Signals) -> None:
        """An engine ends, and another begins at its place."""
        self.engines[port].send_signal(sig)
        await asyncio.to_thread(self.engines[port].wait)
        self.engines[port] = self.engine(port)
        await self.until(port, "down")
        await self.until(port, "up")

    async def killed(self, number: int) -> None:
        """An engine is killed; of a real server the process that computes, which it replaces."""
        port = list(self.engines)[number % len(self.engines)]
        if self.model is None:
            return await self.replace(port, signal.SIGKILL)
        old = self.computing(port)
        old.kill()
        async with asyncio.timeout(300):
            while self.computing(port) in (old, None):
                await asyncio.sleep(0.05)
        await answered(self.session, f"http://127.0.0.1:{port}/health/ready")

    def computing(self, port: int) -> psutil.Process | None:
        """The process of a server that computes, if it has one now."""
        for child in psutil.Process(self.engines[port].pid).children():
            with suppress(psutil.Error):
                if "octavo.client.engine_process" in child.cmdline():
                    return child
        return None

    async def beheaded(self, number: int) -> None:
        """The front process of a server is killed, and the server started again."""
        port = list(self.engines)[number % len(self.engines)]
        family = psutil.Process(self.engines[port].pid).children(recursive=True)
        self.engines[port].kill()
        _, left = await asyncio.to_thread(psutil.wait_procs, family, 5)
        self.tally.orphans += len(left)
        await self.replace(port, signal.SIGKILL)

    async def rolled(self, number: int) -> None:
        for port in self.engines:
            await self.replace(port, signal.SIGTERM)

    async def gone(self, number: int) -> None:
        """The gateway is killed, and another begins at its place."""
        self.open = False
        self.gateway.kill()
        await asyncio.to_thread(self.gateway.wait)
        self.gateway = self.door()
        for port in self.engines:
            await self.until(port, "up")

    async def stopped(self, number: int) -> float:
        """An engine stops in the middle and goes on later: seconds until it gets nothing."""
        port, began = list(self.engines)[0], time.monotonic()
        self.engines[port].send_signal(signal.SIGSTOP)
        await self.until(port, "down")
        felt = time.monotonic() - began
        await asyncio.sleep(STOPPED - felt)
        self.engines[port].send_signal(signal.SIGCONT)
        await self.until(port, "up")
        return felt


Row = Callable[[Bed], Awaitable[None]]
SPOILT = {  # after so many tokens, and bytes at a time
    "F16 cut": (40, faulty.closes, 65536), "F16 reset": (40, faulty.resets, 65536),
    "F16 silence": (20, faulty.says_nothing, 65536), "F16 frame": (40, faulty.no_frame, 65536),
    "F16 event": (40, faulty.no_event, 65536), "F16 1-byte": (40, faulty.resets, 1),
}  # fmt: skip


def half(port: int) -> faulty.Behaviour:
    """Every second answer is 500."""
    good, bad = faulty.proxy(port, 2 * TOKENS, faulty.closes), faulty.page("500 Internal Error")
    return lambda connection, one: (bad if one.posts % 2 else good)(connection, one)


CANARIES: dict[str, Callable[[int], faulty.Behaviour]] = {  # by the port of a good one
    "F17 crash": lambda port: faulty.closes,
    "F17 half": half,
    "F17 slow": lambda port: faulty.proxy(port, 2 * TOKENS, faulty.closes, 256, 9 * STEP),
    "F17 silent": lambda port: faulty.says_nothing,
}


async def nothing(bed: Bed) -> None:
    pass


def spoilt(behaviour: Callable[[int], faulty.Behaviour]) -> Row:
    """A third upstream spoils each of its answers."""

    async def row(bed: Bed) -> None:
        with faulty.faulty(behaviour(list(bed.engines)[0]), owner="octavo") as bad:
            await bed.admin("POST", "/v1/upstreams", {"upstream": bad.url})
            while bed.tally.done < bed.requests:
                await asyncio.sleep(0.05)
            bed.tally.faults = bad.posts

    return row


def canary(fault: Callable[[int], faulty.Behaviour]) -> Row:
    """A release to a version that fails, from a quarter of the requests on."""

    async def row(bed: Bed) -> None:
        with faulty.faulty(fault(list(bed.engines)[0]), owner="octavo") as bad:
            await bed.admin("POST", "/v1/upstreams", {"upstream": f"next={bad.url}"})
            await bed.until(int(bad.url.rpartition(":")[2]), "up")
            while bed.tally.done < bed.requests // 4:
                await asyncio.sleep(0.01)
            began, model = time.monotonic(), "/v1/releases?model=simulated"
            given = {"model": "simulated", "stable": "default", "canary": "next", "steps": [25, 100],
                     "hold": "1h", "max_hold": "2h", "warmup": "5s"}  # fmt: skip
            await bed.admin("POST", "/v1/releases", given)
            while (await bed.admin("GET", model))["phase"] != "rolled_back":
                if bed.tally.done >= bed.requests:
                    raise SystemExit("the release was not rolled back: more --requests are needed")
                await asyncio.sleep(0.02)
            bed.tally.recovery.append(time.monotonic() - began)
            bed.tally.faults = bad.posts
            while bed.tally.done < bed.requests:  # its upstream stays meanwhile
                await asyncio.sleep(0.05)

    return row


async def mismatched(bed: Bed) -> None:
    """F17 too: a release to a version that serves another model does not begin."""
    with faulty.faulty(faulty.closes, owner="octavo", model="another") as bad:
        await bed.admin("POST", "/v1/upstreams", {"upstream": f"next={bad.url}"})
        await bed.until(int(bad.url.rpartition(":")[2]), "up")
        given = {"model": "simulated", "stable": "default", "canary": "next", "steps": [25, 100]}
        with suppress(AssertionError):
            await bed.admin("POST", "/v1/releases", given)
            raise SystemExit("a release to a version that serves another model has begun")
        while bed.tally.done < bed.requests:
            await asyncio.sleep(0.05)
        bed.tally.faults = bad.posts


def often(times: int, fault: Callable[[Bed, int], Awaitable[float | None]]) -> Row:
    return lambda bed: bed.times(times, lambda number: fault(bed, number))


ROWS = {  # engines, what happens, and how many may be lost for each fault and client
    "F01": (2, nothing, 0),
    "F02": (2, often(10, Bed.killed), 0),
    "F03": (1, often(10, Bed.killed), 0),
    "F04": (2, often(5, Bed.beheaded), 0),
    "F05": (2, often(5, Bed.gone), 1),
    "F06": (2, often(1, Bed.stopped), 0),
    "F07": (2, often(10, Bed.rolled), 0),
    **{
        name: (2, spoilt(partial(faulty.proxy, parts=parts, spoil=how, size=size)), 0)
        for name, (parts, how, size) in SPOILT.items()
    },
    "F16 html": (2, spoilt(lambda port: faulty.page("502 Bad Gateway")), 0),
    **{name: (2, canary(how), 0) for name, how in CANARIES.items()},
    "F17 model": (2, mismatched, 0),
}


async def measure(name: str, requests: int, clients: int, model: str | None) -> bool:
    """Whether a row is as it should be; it is printed."""
    engines, happens, allowed = ROWS[name]
    async with AsyncExitStack() as stack:
        limit = aiohttp.ClientTimeout(total=120)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=limit))
        bed = Bed(session, requests, model)
        stack.callback(bed.end)
        await bed.begin(engines)
        numbers, began = iter(range(requests)), time.monotonic()
        await asyncio.gather(happens(bed), *(bed.client(numbers) for _ in range(clients)))
        tally, seconds = bed.tally, time.monotonic() - began
    worst = f"{max(tally.recovery):8.1f}" if tally.recovery else f"{'':8}"
    print(
        f"{name:<12}{tally.faults:7}{tally.done:10}{tally.lost:6}{tally.refused:9}{tally.wrong:7}"
        f"{tally.orphans:8}{worst}{seconds:9.1f}", flush=True,
    )  # fmt: skip
    if tally.said:
        print(f"  {tally.said[:200]}")
    return not (tally.wrong or tally.orphans) and tally.lost <= allowed * clients * tally.faults


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), metavar="ROW", help="F01, F16, …")
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--model", help="what real engines serve; without it they are simulated")
    options = parser.parse_args()
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # children import no file of the current folder
    print(f"{'':<12}{'faults':>7}{'requests':>10}{'lost':>6}{'refused':>9}{'wrong':>7}"
          f"{'orphans':>8}{'worst s':>8}{'seconds':>9}")  # fmt: skip
    named = [name for name in ROWS if name in options.rows or name[:3] in options.rows]
    if options.model is None:
        named = [name for name in named if name != "F04"]  # a simulated server is one process
    good = [
        asyncio.run(measure(name, options.requests, options.clients, options.model))
        for name in named
    ]
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
