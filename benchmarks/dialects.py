"""Tokens per second that 32 streams get in each API, beside chat completions.

    python benchmarks/dialects.py [MODEL] [--streams 32] [--output 64] [--rounds 7]

The same conversations, greedily, so that all of them compute the same tokens; their prompts are in the
prefix cache. Each round asks every API, and each figure is a median of ratios within a round: on
a machine that does other things too, two runs of one API differ by more than two APIs do. The
clients run in this process, on plain sockets, and look at nothing but the last bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from typing import Any

from http_clients import _ready
from startup import free_port

WORDS = "king queen dragon ship storm garden winter forest river castle mountain island".split()


def _post(port: int, path: str, body: Any) -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def bodies(port: int, model: str, said: list[Any], output: int) -> dict[str, tuple[str, Any]]:
    """The request of each API for one conversation."""
    plain = {"model": model, "stream": True}
    tokens = {**plain, "max_tokens": output, "temperature": 0}
    options = {"num_predict": output, "temperature": 0}
    prompt = _post(port, "/apply-template", {"model": model, "messages": said})["prompt"]
    ids = _post(port, "/tokenize", {"model": model, "messages": said})["tokens"]
    return {
        "chat completions": ("/v1/chat/completions", {**tokens, "messages": said}),
        "completions": ("/v1/completions", {**tokens, "prompt": ids}),
        "responses": ("/v1/responses", {**plain, "input": said, "max_output_tokens": output, "temperature": 0, "store": False}),
        "responses, stored": ("/v1/responses", {**plain, "input": said, "max_output_tokens": output, "temperature": 0}),
        "Anthropic messages": ("/v1/messages", {**tokens, "messages": said}),
        "Ollama chat": ("/api/chat", {**plain, "messages": said, "options": options}),
        "llama.cpp completion": ("/completion", {**plain, "prompt": prompt, "n_predict": output, "temperature": 0}),
    }  # fmt: skip


async def _stream(port: int, path: str, body: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    status = int((await reader.readline()).split()[1])
    size = 0
    while chunk := await reader.read(1 << 16):
        size += len(chunk)
    writer.close()
    assert status == 200 and size > 0
    return size


async def _all(port: int, asked: list[tuple[str, bytes]]) -> tuple[float, int]:
    """Seconds of all streams, and bytes of them."""
    began = time.perf_counter()
    sizes = await asyncio.gather(*(_stream(port, *one) for one in asked))
    return time.perf_counter() - began, sum(sizes)


def measure(port: int, a: argparse.Namespace) -> None:
    asked: dict[str, list[tuple[str, bytes]]] = {}
    for i in range(a.streams):
        text = f"Tell me a very long story about a {WORDS[i % len(WORDS)]} and {i} friends."
        for name, (path, body) in bodies(
            port, a.model, [{"role": "user", "content": text}], a.output
        ).items():
            asked.setdefault(name, []).append((path, json.dumps(body).encode()))
    first = next(iter(asked))
    seconds: dict[str, list[float]] = {name: [] for name in asked}
    sizes = {name: asyncio.run(_all(port, each))[1] for name, each in asked.items()}  # and warms up
    for number in range(a.rounds):
        names = list(asked)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds[name].append(asyncio.run(_all(port, asked[name]))[0])
    print(f"{a.streams} streams of {a.output} tokens, {a.rounds} rounds\n")
    print("| API | tokens/s | of chat completions | bytes a token |\n|---|---|---|---|")
    for name, each in seconds.items():
        speed = a.streams * a.output / statistics.median(each)
        ratio = statistics.median(
            base / own for base, own in zip(seconds[first], each, strict=True)
        )
        print(
            f"| {name} | {speed:.0f} | {100 * ratio:.1f} % | {sizes[name] / a.streams / a.output:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    a = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "octavo.cli.main", "serve", a.model, "--offline", "--port", str(port)]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        asyncio.run(_ready(port))
        measure(port, a)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
