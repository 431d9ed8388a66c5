"""Several models in a budget for fewer: what mixed requests get, and what a change of models costs.

python benchmarks/switching.py A.gguf B.gguf C.gguf --memory 290MiB [--requests 500] [--clients 8]

Texts are compared with those that each model writes alone. A change is a request to a model that is
not loaded while all room is taken, less the same request once it is; it is compared with loading
the model from the packed cache where there is room.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

MEASURED = 9  # changes and loads
LOOK = 0.02  # seconds between looks at the engines


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    """`octavo serve` with a packed cache."""

    def __init__(self, models: list[str], memory: str | None) -> None:
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        command = [sys.executable, "-m", "octavo.cli.main", "serve", *models, "--offline",
                   "--packed-cache", "--port", str(port)]  # fmt: skip
        command += ["--memory", memory] if memory else []
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as e:
            return e.code, json.load(e)

    def complete(self, name: str, prompt: str) -> tuple[int, str]:
        body = {"model": name, "prompt": prompt, "max_tokens": 16, "temperature": 0}
        status, reply = self.post("/v1/completions", body)
        return status, reply["choices"][0]["text"] if status == 200 else json.dumps(reply)

    def wait_ready(self) -> None:
        while self.process.poll() is None:
            try:
                with urllib.request.urlopen(self._url + "/health/ready", timeout=5):
                    return
            except OSError:
                time.sleep(0.05)
        raise SystemExit("the server has ended")

    def engines(self) -> int:
        """Bytes that all engine processes have."""
        total = 0
        for child in psutil.Process(self.process.pid).children():
            try:
                if "octavo.client.engine_process" in child.cmdline():
                    total += child.memory_info().rss
            except psutil.Error:
                continue  # it has just ended
        return total


@contextmanager
def serving(models: list[str], memory: str | None = None) -> Iterator[Server]:
    server = Server(models, memory)
    try:
        server.wait_ready()
        yield server
    finally:
        server.process.terminate()
        server.process.wait(60)


def timed(call: Any, *given: Any) -> float:
    began = time.perf_counter()
    assert call(*given)[0] == 200
    return time.perf_counter() - began


def alone(path: str, name: str, prompts: list[str]) -> tuple[dict[str, str], float]:
    """What a model says to prompts, and seconds to load it from the packed cache."""
    with serving([path]) as server:
        said = {prompt: server.complete(name, prompt)[1] for prompt in prompts}
        loads = []
        for _ in range(MEASURED):
            server.post("/v1/models/unload", {"model": name})
            loads.append(timed(server.post, "/v1/models/load", {"model": name}))
    return said, statistics.median(loads)


def mixed(server: Server, asked: list[tuple[str, str]], clients: int) -> tuple[list[Any], int]:
    """The replies to requests that several clients send, and the most memory of the engines."""
    peak, over = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(LOOK):
            peak = max(peak, server.engines())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with ThreadPoolExecutor(clients) as pool:
            return list(pool.map(lambda one: server.complete(*one), asked)), peak
    finally:
        over.set()
        watching.join()


def changes(server: Server, names: list[str]) -> dict[str, list[float]]:
    """Seconds that requests to a model take longer while it is not loaded."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(MEASURED):
        for name in names:
            first = timed(server.complete, name, "Once")
            again = min(timed(server.complete, name, "Once") for _ in range(3))
            found[name].append(first - again)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--memory", required=True, help="the budget: for one model less than all")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--clients", type=int, default=8)
    given = parser.parse_args()
    names = [Path(path).stem for path in given.models]
    prompts = [f"{word} is" for word in "Water Fire Earth Wind Wood Iron Gold Light".split()]
    truth, loads = {}, {}
    for path, name in zip(given.models, names, strict=True):
        truth[name], loads[name] = alone(path, name, prompts)
    rng = random.Random(7)
    asked = [(rng.choice(names), rng.choice(prompts)) for _ in range(given.requests)]
    with serving(given.models, given.memory) as server:
        replies, peak = mixed(server, asked, given.clients)
        costs = changes(server, names)
    failed = sum(status != 200 for status, _ in replies)
    pairs = zip(asked, replies, strict=True)
    wrong = sum(text != truth[name][prompt] for (name, prompt), (_, text) in pairs)
    print(f"{len(asked)} requests of {given.clients} clients: {failed} failed, {wrong} other texts")
    print(f"engines took {peak / (1 << 20):.0f} MiB at most, of {given.memory}")
    for name in names:
        cost = statistics.median(costs[name])
        print(f"{name}: load {loads[name]:.3f} s, change {cost:.3f} s, {cost - loads[name]:+.3f} s")


if __name__ == "__main__":
    main()
