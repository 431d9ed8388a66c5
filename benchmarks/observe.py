"""What metrics, traces and the request log cost, and whether they say what clients see.

python benchmarks/observe.py [MODEL] [--rounds 20] [--streams 8] [--tokens 160] [--threads 1]

Rounds on a server that nobody looks at and on one with traces, a request log and a scrape every five
seconds take turns, so that what else the machine does is felt by both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from octavo.engine.events import Times, Token
from octavo.generate.gaps import Gaps
from octavo.generate.quality import Quality
from octavo.generate.reply import TextDelta, Usage
from octavo.server.exchange import Exchange
from octavo.server.metrics import Metrics
from octavo.server.registry import Registry
from octavo.server.timelines import Timelines

PROMPT = "The history of the sea is long, and nobody has told all of it. "


class Sink(BaseHTTPRequestHandler):
    """Takes traces and keeps nothing."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def server(model: str, *options: str) -> Iterator[int]:
    """The port of a server that is ready."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    command = [
        sys.executable,
        "-m",
        "octavo.cli.main",
        "serve",
        model,
        "--port",
        str(port),
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                get(port, "/health/ready")
                break
            assert process.poll() is None, "the server has ended"
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
        return str(response.read().decode())


def seconds(port: int, path: str) -> float:
    """How long it takes to get something."""
    began = time.perf_counter()
    get(port, path)
    return time.perf_counter() - began


async def stream(port: int, id: str, tokens: int) -> list[float]:
    """When a request was sent, and when each piece of its text came."""
    body = json.dumps({
        "prompt": f"{id} {PROMPT}", "max_tokens": tokens, "stream": True, "ignore_eos": True,
        "temperature": 0, "speculation": "off",
    })  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-request-id: {id}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    )
    times = [time.perf_counter()]
    writer.write(head.encode())
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    writer.close()
    return times


async def rate(port: int, round: str, streams: int, tokens: int) -> float:
    """Tokens a second of several streams at once."""
    began = time.perf_counter()
    await asyncio.gather(*(stream(port, f"{round}-{i}", tokens) for i in range(streams)))
    return streams * tokens / (time.perf_counter() - began)


def cost(model: str, options: argparse.Namespace) -> None:
    """Prints what looking costs in tokens a second, and what a scrape takes."""
    sink = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    threading.Thread(target=sink.serve_forever, daemon=True).start()
    over = threading.Event()
    scrapes: list[float] = []

    def scrape(port: int) -> None:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as another:
            while True:
                scrapes.append(another.submit(seconds, port, "/metrics").result())
                if over.wait(5.0):
                    return

    own = ("--offline", "--threads", str(options.threads))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        watched = "--otlp", f"http://127.0.0.1:{sink.server_port}", "--log-requests", str(Path(folder) / "log")  # fmt: skip
        ports = [stack.enter_context(server(model, *own, *more)) for more in ((), watched)]
        threading.Thread(target=scrape, args=(ports[1],), daemon=True).start()
        found: list[list[float]] = [[], []]
        before = [processor(port) for port in ports]
        for round in range(-1, options.rounds):  # the first is a warm-up
            for which in (0, 1) if round % 2 else (1, 0):
                speed = asyncio.run(
                    rate(ports[which], f"r{round}", options.streams, options.tokens)
                )
                if round >= 0:
                    found[which].append(speed)
        over.set()
        spent = [
            (processor(p) - b) / (options.rounds + 1) for p, b in zip(ports, before, strict=True)
        ]
    sink.shutdown()
    pairs = [100 * (1 - on / off) for off, on in zip(*found, strict=True)]
    quiet, loud = map(statistics.median, found)
    print(f"tokens/s  {quiet:.1f} unwatched, {loud:.1f} watched; lost, of pairs: "
          f"{statistics.median(pairs):+.2f} % (median), {min(pairs):+.2f} to {max(pairs):+.2f} %")  # fmt: skip
    each = [1e6 * s / options.streams / options.tokens for s in spent]
    print(f"processor {each[0]:.0f} µs a token unwatched, {each[1]:.0f} watched: "
          f"{100 * (each[1] / each[0] - 1):+.2f} %")  # fmt: skip
    took = sorted(1000 * s for s in scrapes)
    print(
        f"scrape    {statistics.median(took):.1f} ms (median), {took[-1]:.1f} ms (worst of {len(took)})"
    )


def agreement(model: str, options: argparse.Namespace) -> None:
    """Prints how far what the server says is from what a client sees, request by request."""
    first, gaps = [], []
    with server(model, "--offline", "--threads", str(options.threads)) as port:
        for i in range(5 * options.rounds):
            sent, *came = asyncio.run(stream(port, f"a{i}", 32))
            line = ended(port, f"a{i}")
            tokens = line["tokens"]
            first.append(1000 * abs(came[0] - sent - line["ttft"]))
            pairs = zip(came, came[1:], tokens, tokens[1:], strict=False)
            gaps += [1000 * abs((b - a) - (d - c)) for a, b, c, d in pairs]
    for name, apart in (("TTFT", first), ("ITL", gaps)):
        middle, p99 = statistics.median(apart), sorted(apart)[int(0.99 * len(apart))]
        print(
            f"{name:<9} a client's is {middle:.3f} ms apart (median of {len(apart)}; p99 {p99:.3f})"
        )


def processor(port: int) -> float:
    """Seconds of processor time of a server and its engine."""
    lines = [line.split() for line in get(port, "/metrics").splitlines()]
    return sum(float(v) for name, v in (x for x in lines if len(x) == 2)
               if name.partition("{")[0].endswith("process_cpu_seconds_total"))  # fmt: skip


def ended(port: int, id: str) -> Any:
    """The time line of a request, which is there a moment after its last byte."""
    while True:
        with contextlib.suppress(urllib.error.HTTPError):
            return json.loads(get(port, f"/v1/requests/{id}"))


def work() -> None:
    """Prints what is done for a token, and at the end of a request, without a server."""
    many = 100_000
    usage, watched, gaps = Usage(), Quality(False), Gaps()
    times = Times(1.0, 1.0, 1.0, 1.0)
    event, delta = Token("a", 5, times=times), TextDelta(0, "a", ids=[5])
    began = time.perf_counter()
    for i in range(many):
        usage.stamp(event.times)
        gaps.token(1.0 + i, float(i))
        watched.push(delta)
    token = (time.perf_counter() - began) / many
    metrics = Metrics(Registry())
    lines = Timelines({}, metrics.slow)
    usage = Usage(prompt=9, completion=9, began=1.0, submitted=1.1, admitted=1.2, first=1.3, last=2.0, finishes=["stop"], gaps=gaps)  # fmt: skip
    one = Exchange("/v1/completions", "POST", 200, usage=usage, model="a", began=1.0)
    one.ended = 2.01
    began = time.perf_counter()
    for _ in range(2000):
        metrics.finished(one)
        lines.add(one)
    request = (time.perf_counter() - began) / 2000
    print(f"work      {1e6 * token:.2f} µs a token, {1e6 * request:.0f} µs a request")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    work()
    agreement(options.model, options)
    cost(options.model, options)


if __name__ == "__main__":
    main()
