"""What a user feels of others: a flood of another key, and a prompt of 4,096 tokens.

python benchmarks/fairness.py [MODEL] [--flood 200] [--visits 30] [--threads 1]

Quiet and crowded visits take turns, so that what else the machine does is felt by both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT, TOKENS = 100, 40  # of a visit
EACH = 100, 100  # prompt and tokens of a request of the flood
LONG = 4096


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def octavo(*words: str) -> list[str]:
    return [sys.executable, "-m", "octavo.cli.main", *words]


class User:
    """One key."""

    def __init__(self, port: int, key: str, model: str, seed: int) -> None:
        self._port, self._key, self._model = port, key, model
        self._rng = random.Random(seed)

    async def ask(self, prompt: int, tokens: int, stream: bool) -> list[float]:
        """When the request was sent, and when each of its tokens came."""
        words = " ".join(self._rng.choice(WORDS) for _ in range(prompt))
        body = {"model": self._model, "prompt": words, "max_tokens": tokens, "stream": stream,
                "ignore_eos": True, "temperature": 0}  # fmt: skip
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            f"authorization: Bearer {self._key}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        times = [time.perf_counter()]
        writer.write(head.encode() + data)
        first = await reader.readline()
        if b" 200 " not in first:
            raise SystemExit(f"{first.decode()}{(await reader.read()).decode()}")
        while part := await reader.read(1 << 16):
            times += [time.perf_counter()] * part.count(b'"text"')
        writer.close()
        await writer.wait_closed()
        return times


WORDS = "the cat sat on a mat and ran to see what was in old red box by sea".split()


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


class Felt:
    """Times of visits."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.between: list[float] = []

    def add(self, times: list[float]) -> None:
        self.first.append(times[1] - times[0])
        self.between += [b - a for a, b in zip(times[1:], times[2:], strict=False)]

    def against(self, quiet: Felt) -> str:
        first = statistics.median(self.first), statistics.median(quiet.first)
        between = p99(self.between), p99(quiet.between)
        return (
            f"first token p50 {1000 * first[0]:.0f} ms, quiet {1000 * first[1]:.0f} ({first[0] / first[1]:.2f}); "
            f"between tokens p99 {1000 * between[0]:.0f} ms, quiet {1000 * between[1]:.0f} ({between[0] / between[1]:.2f})"
        )


async def flood(user: User, count: int, over: asyncio.Event) -> None:
    """Keeps so many requests in flight."""

    async def again() -> None:
        while not over.is_set():
            await user.ask(*EACH, stream=False)

    await asyncio.gather(*(again() for _ in range(count)))


async def visit(user: User, felt: Felt, count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0.05 + random.random() / 5)
        felt.add(await user.ask(PROMPT, TOKENS, stream=True))


async def flooded(port: int, keys: list[str], model: str, count: int, visits: int) -> str:
    light = User(port, keys[0], model, 1)
    quiet, crowded = Felt(), Felt()
    await visit(light, Felt(), 3)
    for turn in range(2):
        await visit(light, quiet, visits // 2)
        other = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--of", str(port), keys[1], model, str(count), str(turn)
        )
        await asyncio.sleep(4)
        await visit(light, crowded, visits // 2)
        other.terminate()
        await other.wait()
        await asyncio.sleep(1)
    return crowded.against(quiet)


async def stalled(port: int, keys: list[str], model: str, own: bool) -> str:
    """A stream while a long prompt is computed, of the same key or of another."""
    light, other = User(port, keys[0], model, 2), User(port, keys[0 if own else 1], model, 3)
    quiet, crowded = Felt(), Felt()
    for _ in range(3):
        quiet.add(await light.ask(20, 150, stream=True))
        text = asyncio.create_task(light.ask(20, 400, stream=True))
        await asyncio.sleep(0.2)
        began = time.perf_counter()
        await other.ask(LONG, 1, stream=False)
        ended = time.perf_counter()
        crowded.add([0.0, *(t for t in await text if began <= t <= ended)])
    return crowded.against(quiet).partition("; ")[2]


def main() -> None:
    if sys.argv[1:2] == ["--of"]:
        port, key, model, count, turn = sys.argv[2:]
        os.nice(5)  # it is not what is measured
        asyncio.run(flood(User(int(port), key, model, 10 + int(turn)), int(count), asyncio.Event()))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument(
        "--flood", type=int, default=200, help="requests of the other key in flight"
    )
    parser.add_argument("--visits", type=int, default=30)
    parser.add_argument("--threads", default=None, help="of the engine")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file, port = str(Path(folder) / "keys.db"), free_port()
        made: list[Any] = [
            subprocess.run(octavo("key", "create", name, "--keys", file), capture_output=True, text=True, check=True)
            for name in ("light", "flood")
        ]  # fmt: skip
        keys = [one.stdout.split()[-1] for one in made]
        threads = ["--threads", given.threads] if given.threads else []
        server = subprocess.Popen(
            octavo("serve", given.model, "--offline", "--keys", file, "--port", str(port), "--log-level", "error", *threads),
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            while subprocess.run(
                ["curl", "-sf", "-o", "/dev/null", f"http://127.0.0.1:{port}/health/ready"]
            ).returncode:
                time.sleep(0.2)
            print(
                "flood: ", asyncio.run(flooded(port, keys, given.model, given.flood, given.visits))
            )
            for own in (True, False):
                text = asyncio.run(stalled(port, keys, given.model, own))
                print(f"{LONG} tokens of {'the same' if own else 'another'} key: ", text)
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    main()
