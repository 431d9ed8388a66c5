"""What a gateway adds: time to the first chunk and processor time, beside going there directly.

    python benchmarks/gateway.py [--streams 1 32] [--rounds 3] [--body 4096] [--chunks 64]
                                 [--peer NAME=ENV] [--anywhere]

The upstream says so many chunks, 5 ms apart, and costs next to nothing. It and the clients have
half of the cores and what is measured has the other half, as if on another host; --anywhere lets
all run wherever the system puts them. Ways take turns within each round, so that what else the
machine does is felt by all of them. "bytes alone" passes on what comes and reads none of it: what
sockets and the event loop cost anybody. Processor time is given as a multiple of it, too, which
depends less on the host. "uvicorn alone" is an application of twenty lines that passes streams on
and does nothing else. What a request costs once is in the figures for each chunk, the less the more
chunks there are. Peers are started from environments of their own, in which they
have been installed (`peers/gateways.py`):

    python -m venv smg && smg/bin/pip install smg
    python -m venv litellm && litellm/bin/pip install "litellm[proxy]"
    python benchmarks/gateway.py --peer smg=smg --peer vllm-router=router --peer litellm=litellm

Any other is named with its command, for example --peer "nginx=./start-nginx {port} {upstream}".
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
from peers.gateways import command as command_of
from starlette.types import ASGIApp, Receive, Scope, Send

PAUSE = 0.005  # seconds between chunks
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MODELS = b'{"object":"list","data":[{"id":"m","object":"model","created":0,"owned_by":"%s"}]}'


def framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def chunk(number: int, told: bool) -> bytes:
    data = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
            "choices": [{"index": 0, "delta": {"content": f" word{number}"}, "finish_reason": None}]}  # fmt: skip
    said = b"data: " + json.dumps(data).encode() + b"\n\n"
    return framed(said + (b": tokens [%d]\n\n" % number if told else b""))


class Upstream(asyncio.Protocol):
    """Answers every request with the same stream. owner: "octavo" for one that can be resumed."""

    def __init__(self, owner: bytes, chunks: int) -> None:
        self._told = owner == b"octavo"
        self._models = MODELS % owner
        self._data = bytearray()
        self._chunks = [chunk(i, self._told) for i in range(chunks)]
        end = b"data: [DONE]\n\n" + (b': usage {"prompt_tokens":1}\n\n' if self._told else b"")
        self._end = framed(end) + b"0\r\n\r\n"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = bytes(self._data).partition(b"\r\n\r\n")
        if not found:
            return
        length = next(
            (
                int(line[15:])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length:")
            ),
            0,
        )
        if len(body) < length:
            return
        self._data.clear()
        if head.startswith(b"POST"):
            self._begun = time.monotonic()
            self._transport.write(HEAD + self._chunks[0])
            asyncio.get_running_loop().call_later(PAUSE, self._say, 1)
        else:
            size = len(self._models)
            kind = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % size
            self._transport.write(b"HTTP/1.1 200 OK\r\n" + kind + self._models)

    def _say(self, number: int) -> None:
        if number == len(self._chunks):
            return self._transport.write(self._end)
        self._transport.write(self._chunks[number])
        due = self._begun + (number + 1) * PAUSE
        asyncio.get_running_loop().call_later(max(due - time.monotonic(), 0), self._say, number + 1)


class Splice(asyncio.Protocol):
    """Passes bytes on to the other side, each side of a connection."""

    def __init__(self, other: Splice | None = None, port: int = 0) -> None:
        self._other, self._port = other, port
        self._early = bytearray()
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        if self._other is None:
            self._task = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        there, other = await loop.create_connection(lambda: Splice(self), "127.0.0.1", self._port)
        there.write(self._early)
        self._other = other

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._early += data
        else:
            self._other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._other is not None and self._other.transport is not None:
            self._other.transport.close()


def bare(there: int) -> ASGIApp:
    """Passes on the streams of the server at a port, with connections that are used again."""
    from octavo.gateway.connection import UpstreamConnection, head_of

    idle: list[UpstreamConnection] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        if not idle:
            loop = asyncio.get_running_loop()
            idle.append((await loop.create_connection(UpstreamConnection, "127.0.0.1", there))[1])
        upstream = idle.pop()
        upstream.ask(head_of("POST", scope["path"], {"host": "localhost"}, len(body)), body)
        while not upstream.status:
            await upstream.come()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while upstream.held or not upstream.ended:
            if upstream.held:
                part = {"type": "http.response.body", "body": upstream.take(), "more_body": True}
                await send(part)
            else:
                await upstream.come()
        idle.append(upstream)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


async def listen(port: int, protocol: Callable[[], asyncio.Protocol]) -> None:
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", port)
    await server.serve_forever()


def body(size: int) -> bytes:
    text = "word " * (size // 5)
    asked = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": True}
    return json.dumps(asked).encode()


async def ask(port: int, data: bytes) -> tuple[float, int]:
    """Seconds to the first chunk, and how many came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    began = time.perf_counter()
    writer.write(head.encode() + data)
    first, seen, tail = 0.0, 0, b""
    while b"[DONE]" not in tail:
        got = await reader.read(65536)
        if not got:
            raise SystemExit(f"the answer broke off after {seen} chunks: {tail[-200:]!r}")
        seen += got.count(b"data: {")
        if seen and not first:
            first = time.perf_counter() - began
        tail = (tail + got)[-4000:]
    writer.close()
    return first, seen


@dataclass
class Way:
    """A port, the processes behind it, and what was measured."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    firsts: dict[int, list[float]] = field(default_factory=dict)
    cpu: dict[int, list[float]] = field(default_factory=dict)

    def used(self) -> float:
        """Seconds of processor time of the process and its children."""
        one = psutil.Process(self.process.pid)
        return sum(sum(p.cpu_times()[:2]) for p in (one, *one.children(recursive=True)))


async def load(way: Way, streams: int, requests: int, data: bytes, chunks: int) -> None:
    """Requests, so many at once."""
    left = iter(range(requests))
    before = way.used()
    firsts: list[float] = []

    async def one(place: int) -> None:
        await asyncio.sleep(place * chunks * PAUSE / streams)  # they do not come together
        for _ in left:
            first, seen = await ask(way.port, data)
            assert seen >= chunks, seen  # LiteLLM says one more
            firsts.append(first)

    await asyncio.gather(*(one(i) for i in range(streams)))
    way.firsts.setdefault(streams, []).extend(firsts)
    way.cpu.setdefault(streams, []).append((way.used() - before) / (requests * chunks))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start(command: list[str], cores: set[int]) -> subprocess.Popen[bytes]:
    """Starts a process that runs on these cores alone."""
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )  # fmt: skip


def halves(anywhere: bool) -> tuple[set[int], set[int]]:
    """The cores of clients and upstreams, and of what is between them."""
    cores = sorted(os.sched_getaffinity(0))
    if anywhere or len(cores) == 1:
        return set(cores), set(cores)
    return set(cores[: len(cores) // 2]), set(cores[len(cores) // 2 :])


def wait_for(port: int, seconds: float = 90) -> None:
    """Until a stream comes whole."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            asyncio.run(ask(port, body(64)))
            return
        except (OSError, SystemExit) as e:
            if time.monotonic() > deadline:
                raise SystemExit(f"nothing answers at port {port}: {e}") from None
        time.sleep(0.1)


def row(way: Way, splice: Way, streams: int) -> dict[str, object]:
    """What was measured of a way. splice: the one that passes bytes alone."""
    firsts = sorted(way.firsts[streams])
    cpu, least = (statistics.median(each.cpu[streams]) for each in (way, splice))
    p99 = firsts[min(int(len(firsts) * 0.99), len(firsts) - 1)]
    return {
        "way": way.name, "streams": streams, "requests": len(firsts),
        "ttft_p50_ms": round(1e3 * statistics.median(firsts), 2), "ttft_p99_ms": round(1e3 * p99, 2),
        "cpu_us_per_chunk": round(1e6 * cpu, 1), "times_bytes_alone": round(cpu / least, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--body", type=int, default=4096, help="bytes of a request")
    parser.add_argument("--chunks", type=int, default=64, help="of a stream")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=ENV")
    parser.add_argument("--anywhere", action="store_true", help="no process has cores of its own")
    parser.add_argument("--upstream", metavar="PORT:OWNER", help=argparse.SUPPRESS)
    parser.add_argument("--splice", metavar="PORT:PORT", help=argparse.SUPPRESS)
    parser.add_argument("--bare", metavar="PORT:PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.upstream:
        import uvloop

        port, _, owner = options.upstream.partition(":")
        return uvloop.run(listen(int(port), lambda: Upstream(owner.encode(), options.chunks)))
    if options.splice:
        import uvloop

        port, _, there = options.splice.partition(":")
        return uvloop.run(listen(int(port), lambda: Splice(port=int(there))))
    if options.bare:
        import uvicorn

        port, _, there = options.bare.partition(":")
        return uvicorn.run(bare(int(there)), port=int(port), log_level="critical", lifespan="off")
    ways = []
    ends, middle = halves(options.anywhere)
    os.sched_setaffinity(0, ends)
    try:
        upstream = [sys.executable, __file__, "--chunks", str(options.chunks), "--upstream"]
        for owner in ("somebody", "octavo"):
            port = free_port()
            ways.append(
                Way(
                    f"direct ({owner})",
                    port,
                    start([*upstream, f"{port}:{owner}"], ends),
                )
            )
            wait_for(port)
        direct, own = ways
        for name, option in (("bytes alone", "--splice"), ("uvicorn alone", "--bare")):
            port = free_port()
            command = [sys.executable, __file__, option, f"{port}:{direct.port}"]
            ways.append(Way(name, port, start(command, middle)))
        gateway = [sys.executable, "-P", "-m", "octavo.cli.main", "gateway", "--log-level", "error"]
        for name, behind in (("gateway", direct), ("gateway, resumable", own)):
            port = free_port()
            command = [
                *gateway,
                "--port",
                str(port),
                "--upstream",
                f"http://127.0.0.1:{behind.port}",
            ]
            ways.append(Way(name, port, start(command, middle)))
        for peer in options.peer:
            name, _, how = peer.partition("=")
            port = free_port()
            words = command_of(name, how, port, f"http://127.0.0.1:{direct.port}")
            ways.append(Way(name, port, start(words, middle)))
        for way in list(ways):
            try:
                wait_for(way.port)
            except SystemExit as e:
                print(f"{way.name} is left out: {e}")
                way.process.kill()
                ways.remove(way)
        data = body(options.body)
        for _ in range(options.rounds):
            for streams in options.streams:
                requests = 8 if streams == 1 else 4 * streams
                for way in ways:
                    asyncio.run(load(way, streams, requests, data, options.chunks))
        print(
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.body} bytes a body, {options.chunks} chunks"
        )
        for streams in options.streams:
            for way in ways:
                print(json.dumps(row(way, ways[2], streams)))
    finally:
        for way in ways:
            way.process.terminate()
            way.process.wait(20)


if __name__ == "__main__":
    main()
