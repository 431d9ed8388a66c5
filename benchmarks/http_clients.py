"""Tokens per second that streaming clients get over HTTP, beside the same work within the process.

    python benchmarks/http_clients.py [MODEL] [--clients 32] [--prompt 128] [--output 64] [--rounds 3]

Clients run in one process of their own, on plain sockets; all of it shares the machine's cores with
the server, as a reverse proxy on the same host would. Rounds alternate; figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from startup import free_port

VOCABULARY = 30_000  # prompts are random ids below this


async def _stream(port: int, body: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    last = b""
    while chunk := await reader.read(1 << 16):
        last = (last + chunk)[-1000:]
    writer.close()
    usage = re.search(
        rb'"completion_tokens":(\d+)', last
    )  # counted there: events may carry several tokens
    return int(usage[1]) if usage else 0


async def _clients(port: int, model: str, clients: int, prompt: int, output: int) -> float:
    bodies = [
        json.dumps({
            "model": model, "prompt": [random.randrange(3, VOCABULARY) for _ in range(prompt)],
            "max_tokens": output, "temperature": 0, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }).encode()
        for _ in range(clients)
    ]  # fmt: skip
    began = time.perf_counter()
    counts = await asyncio.gather(*(_stream(port, b) for b in bodies))
    took = time.perf_counter() - began
    assert counts == [output] * clients, counts
    return clients * output / took


async def _ready(port: int) -> None:
    for _ in range(600):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
            status = await reader.readline()
            writer.close()
            if b" 200 " in status:
                return
        except OSError:
            pass
        await asyncio.sleep(0.1)
    raise RuntimeError("the server is not ready after a minute")


def over_http(
    model: str, clients: int, prompt: int, output: int, python: str = sys.executable
) -> float:
    port = free_port()
    command = [python, "-m", "octavo.cli.main", "serve", model, "--offline", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        asyncio.run(_ready(port))
        asyncio.run(_clients(port, model, clients, 16, 4))
        return asyncio.run(_clients(port, model, clients, prompt, output))
    finally:
        server.terminate()
        server.wait()


def in_process(model: str, clients: int, prompt: int, output: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        numbers = {"batch": clients, "prompt": prompt, "output": output, "repeats": 1, "json": out}
        flags = [str(x) for k, v in numbers.items() for x in (f"--{k}", v)]
        command = [sys.executable, "-m", "octavo.cli.main", "bench", "engine", model, *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (run,) = json.loads(out.read_text())["runs"]
    seconds = clients * prompt / run["prefill_tps"] + clients * (output - 1) / run["decode_tps"]
    return clients * output / seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    work = (a.model, a.clients, a.prompt, a.output)
    rounds = [(over_http(*work), in_process(*work)) for _ in range(a.rounds)]
    http, own = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(f"{http:.0f} tokens/s over HTTP, {own:.0f} within the process: {100 * http / own:.0f} %")


if __name__ == "__main__":
    main()
