"""One connection and its limits, against a real listener with a small application behind it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from octavo.server.connection import OVERFLOW, Connection, ConnectionLimits, watch
from octavo.server.dialects.openai.errors import error_body
from octavo.server.exchange import Exchange
from tests.waiting import until

QUICK = ConnectionLimits(
    connections=20, head_seconds=0.5, body_idle_seconds=1.0, body_seconds=2.0, write_seconds=1.0,
    discarded=1 << 20,
)  # fmt: skip


class Backend:
    """Listens with a Connection; its application counts who is served and who has left."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.exchanges: list[Exchange] = []
        self.running = self.gone = self.answered = 0
        self.release = threading.Event()
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.port = self.sock.getsockname()[1]
        self.dialled: list[socket.socket] = []
        self.server: uvicorn.Server | None = None

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """/wait answers when released, /flood streams for ever, /deaf never reads, others echo."""
        path = scope["path"]
        self.running += 1
        try:
            if path == "/wait":
                await self.until_released(receive)
            elif path == "/flood":
                await self.flood(receive, send)
                return
            size = 0
            more = path not in ("/wait", "/deaf")
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.gone += 1
                    return
                size += len(message["body"])
                more = message["more_body"]
            body = json.dumps({"path": path, "size": size}).encode()
            headers = [(b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            self.answered += 1
        finally:
            self.running -= 1

    async def until_released(self, receive: Receive) -> None:
        left = asyncio.ensure_future(self.leave(receive))
        while not self.release.is_set():
            await asyncio.sleep(0.005)
            if left.done():
                self.gone += 1
                raise asyncio.CancelledError
        left.cancel()

    async def leave(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def flood(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        left = asyncio.ensure_future(self.leave(receive))
        while not left.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        self.gone += 1

    async def serve(self) -> None:
        made = partial(
            Connection, limits=self.limits, observe=self.exchanges.append, error_body=error_body
        )
        config = uvicorn.Config(
            self.app, http=made, ws="none", log_config=None, lifespan="off", interface="asgi3",  # type: ignore[arg-type]
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        watching = asyncio.create_task(self.watch())
        await self.server.serve([self.sock])
        watching.cancel()

    async def watch(self) -> None:
        assert self.server is not None
        while True:  # as `watch`, ten times as often
            await asyncio.sleep(0.1)
            for connection in list(self.server.server_state.connections):
                assert isinstance(connection, Connection)
                connection.check(time.monotonic())

    def dial(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        self.dialled.append(sock)
        return sock


@contextmanager
def backend(limits: ConnectionLimits = QUICK, made: type[Backend] = Backend) -> Iterator[Backend]:
    one = made(limits)
    thread = threading.Thread(target=lambda: uvloop.run(one.serve()))
    thread.start()
    try:
        until(lambda: one.server is not None and one.server.started)
        yield one
    finally:
        for sock in one.dialled:
            sock.close()
        assert one.server is not None
        one.server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def request(path: str = "/", *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


def read_all(sock: socket.socket) -> bytes:
    out = b""
    while chunk := sock.recv(65536):
        out += chunk
    return out


def refusal(sock: socket.socket) -> tuple[int, str]:
    """Status and code of an answer after which the connection ends."""
    head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head and b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


LONG = [
    (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * (1 << 20), 431, "headers_too_large"),
    (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200, 431, "headers_too_large"),
    (b"GET / HTTP/1.1\r\n" + (b"A: " + b"b" * 8000 + b"\r\n") * 10, 431, "headers_too_large"),
    (b"GET /" + b"a" * 10_000, 414, "url_too_long"),
    (b"GET / HTTP/1.1\r\n" + b"a" * (1 << 20), 431, "headers_too_large"),
    (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: " + b"a" * (1 << 20), 431, "headers_too_large"),
    (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"A: b\r\n" * 200, 431, "headers_too_large"),
    (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"a" * (1 << 20), 431, "headers_too_large"),
    (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400, "invalid_http"),
    (b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400, "invalid_http"),
    (b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "invalid_http"),
    (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", 400, "invalid_http"),
    (b"\x16\x03\x01\x02\x00\x01", 400, "invalid_http"),
    (b"GET / HTTP/1.1\r\nA\0: b\r\n\r\n", 400, "invalid_http"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "status", "code"), LONG, ids=range(len(LONG)))
def test_refused_in_json(data: bytes, status: int, code: str) -> None:
    """A client that goes on sending sees its answer all the same; it is recorded once."""
    with backend() as server, server.dial() as sock:
        sock.sendall(data)
        assert refusal(sock) == (status, code)
        until(lambda: not server.running)
        assert [(e.status, e.code) for e in server.exchanges] == [(status, code)]
        assert not server.answered


def test_128_headers_are_taken() -> None:
    with backend() as server, server.dial() as sock:
        sock.sendall(request("/", *(f"A{i}: b" for i in range(126)), "Connection: close"))
        assert read_all(sock).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", ["/wait", "/"])
def test_half_closed_client_gets_its_answer(path: str) -> None:
    """Byte for byte the answer that others get, though its first bytes may have gone ahead."""
    with backend() as server:
        answers = []
        for half in (False, True):
            server.release.clear()
            with server.dial() as sock:
                sock.sendall(request(path, "Connection: close"))
                if half:
                    sock.shutdown(socket.SHUT_WR)
                time.sleep(0.3)
                server.release.set()
                answers.append(read_all(sock))
        assert answers[0] == answers[1] and answers[0].startswith(b"HTTP/1.1 200 OK\r\n")
        until(lambda: not server.running)


def test_half_closed_pipeline_is_answered_in_order() -> None:
    with backend() as server, server.dial() as sock:
        sock.sendall(request("/wait") + request("/second") + request("/third"))
        sock.shutdown(socket.SHUT_WR)
        time.sleep(0.1)
        server.release.set()
        text = read_all(sock)
        assert [text.count(p) for p in (b"/wait", b"/second", b"/third")] == [1, 1, 1]
        assert text.count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize("then", [b"", request("/second")])
def test_half_closed_client_gets_a_head_without_a_body(then: bytes) -> None:
    with backend() as server, server.dial() as sock:
        sock.sendall(request("/first", method="HEAD") + then)
        sock.shutdown(socket.SHUT_WR)
        heads = read_all(sock).split(b"HTTP/1.1 200 OK\r\n")
        assert heads[0] == b"" and len(heads) == (3 if then else 2)


def test_half_closed_client_is_told_to_go_on_before_its_answer() -> None:
    with backend() as server, server.dial() as sock:
        head = request("/wait", "Expect: 100-continue", "Content-Length: 4", method="POST")
        sock.sendall(head + b"body")
        sock.shutdown(socket.SHUT_WR)
        time.sleep(0.3)  # in which the first bytes of the answer are sent
        server.release.set()
        told, _, answer = read_all(sock).partition(b"\r\n\r\n")
        assert told == b"HTTP/1.1 100 Continue" and answer.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("path", ["/wait", "/flood"])
def test_closed_client_is_noticed(path: str) -> None:
    """Closing sends the same packet as half-closing; it must not be taken for it."""
    with backend() as server:
        sock = server.dial()
        sock.sendall(request(path))
        until(lambda: server.running == 1)
        time.sleep(0.1)
        began = time.monotonic()
        sock.close()
        until(lambda: server.gone == 1)
        assert time.monotonic() - began < 5
        until(lambda: not server.running)


def test_slow_heads_end() -> None:
    with backend() as server, server.dial() as silent, server.dial() as slow:
        slow.sendall(b"GET / HT")
        assert refusal(slow) == (408, "request_timeout")
        assert read_all(silent) == b""
        assert [e.status for e in server.exchanges] == [408]


def test_slow_bodies_end() -> None:
    with backend() as server, server.dial() as idle, server.dial() as drip:
        for sock in (idle, drip):
            sock.sendall(request("/", "Content-Length: 1000", method="POST"))
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - began < 10:
                drip.sendall(b"x")
                time.sleep(0.2)
        assert 1.9 < time.monotonic() - began < 5
        assert refusal(idle) == (408, "request_timeout")
        until(lambda: server.gone == 2 and not server.running)


def test_time_between_requests_is_not_time_for_a_request() -> None:
    with backend() as server, server.dial() as sock:
        for _ in range(2):
            sock.sendall(request())
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
            time.sleep(0.8)
        sock.sendall(request("/wait"))  # nor is time for an answer
        time.sleep(2.5)
        server.release.set()
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        assert not server.exchanges


def test_stream_that_is_not_read_ends() -> None:
    with backend() as server, server.dial() as sock:
        sock.sendall(request("/flood"))
        until(lambda: server.running == 1)
        until(lambda: server.gone == 1 and not server.running)


def test_stream_that_is_read_slowly_goes_on() -> None:
    with backend() as server, server.dial() as sock:
        sock.sendall(request("/flood"))
        began = time.monotonic()
        while time.monotonic() - began < 3:
            assert sock.recv(1 << 20)
            time.sleep(0.01)
        assert server.gone == 0 and server.running == 1


def test_unread_answers_do_not_keep_connections() -> None:
    """An answer that is larger than the socket's buffers, to one that asked for many and left it."""
    with backend() as server, server.dial() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(request("/flood"))
        until(lambda: server.gone == 1)
        assert server.server is not None
        connections = server.server.server_state.connections
        until(lambda: not connections)


def test_many_pipelined_requests_are_answered_up_to_the_limit() -> None:
    with backend() as server, server.dial() as sock:
        sock.sendall(request("/wait") + request("/next") * 5000)
        time.sleep(0.2)
        server.release.set()
        text = read_all(sock)
        assert text.count(b"HTTP/1.1 200 OK") == 1 + QUICK.pipelined
        until(lambda: not server.running)


def test_pipelined_streams_end_with_their_client() -> None:
    with backend() as server:
        with server.dial() as sock:
            sock.sendall(request("/flood") + request("/flood"))
            assert sock.recv(1000)
        until(lambda: server.gone >= 1 and not server.running)


def test_a_body_that_nobody_reads() -> None:
    """The answer comes before the body; the rest is dropped up to a limit, and the connection lives."""
    with backend() as server, server.dial() as sock:
        sock.sendall(request("/deaf", "Content-Length: 500000", method="POST"))
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        sock.sendall(b"x" * 500_000 + request("/again", "Connection: close"))
        assert b"/again" in read_all(sock)
    with backend() as server, server.dial() as sock:
        sock.sendall(request("/deaf", "Content-Length: 5000000", method="POST"))
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        with pytest.raises(OSError):
            for _ in range(100):
                sock.sendall(b"x" * 50_000)
                time.sleep(0.001)


def test_idle_connections_make_room() -> None:
    """The one that nothing has been done for longest goes first."""
    with backend(replace(QUICK, head_seconds=60)) as server:
        idle = [server.dial() for _ in range(QUICK.connections)]
        assert server.server is not None
        connections = server.server.server_state.connections
        until(lambda: len(connections) == QUICK.connections)
        for sock in idle[:10]:
            sock.sendall(request())
            assert sock.recv(65536)
        for i in range(5):
            sock = server.dial()
            sock.sendall(request(f"/{i}"))
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
            assert idle[10 + i].recv(1) == b""
        idle[0].sendall(request())
        assert idle[0].recv(65536).startswith(b"HTTP/1.1 200")


def occupied(server: Backend) -> list[socket.socket]:
    """As many connections as there may be, each with a request that waits."""
    busy = [server.dial() for _ in range(QUICK.connections)]
    for sock in busy:
        sock.sendall(request("/wait", "Connection: close"))
    until(lambda: server.running == len(busy))
    return busy


def test_busy_connections_stay_and_others_are_told() -> None:
    with backend() as server:
        busy = occupied(server)
        with server.dial() as late:
            late.sendall(request())
            assert refusal(late) == (503, "overloaded")
        crowd = [server.dial() for _ in range(100)]
        server.release.set()
        for sock in busy:
            assert read_all(sock).startswith(b"HTTP/1.1 200")
        with server.dial() as sock:  # while those that were refused are still there
            sock.sendall(request("/", "Connection: close"))
            assert read_all(sock).startswith(b"HTTP/1.1 200")
        for sock in crowd:
            sock.close()


def test_idle_connections_make_room_while_others_are_being_refused() -> None:
    with backend() as server:
        busy = occupied(server)
        refused = [server.dial() for _ in range(OVERFLOW)]
        for sock in refused:
            sock.sendall(request())
            assert sock.recv(65536).startswith(b"HTTP/1.1 503")  # and they stay for a while
        server.release.set()
        for sock in busy:
            assert read_all(sock).startswith(b"HTTP/1.1 200")
        for _ in range(QUICK.connections + 5):
            sock = server.dial()
            sock.sendall(request())
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
            refused.append(sock)
        for sock in refused:
            sock.close()


def test_upgrades_are_answered_as_plain_requests() -> None:
    """What Java's client offers with every request, and a WebSocket handshake."""
    with backend() as server:
        for upgrade in ("h2c", "websocket"):
            for body in (b"", b"hello"):
                with server.dial() as sock:
                    method = "POST" if body else "GET"
                    headers = [
                        "Connection: Upgrade",
                        f"Upgrade: {upgrade}",
                        f"Content-Length: {len(body)}",
                    ]
                    sock.sendall(request("/u", *headers, method=method) + body[:2])
                    time.sleep(0.05)
                    sock.sendall(body[2:] + request("/next", "Connection: close"))
                    text = read_all(sock)
                    assert text.count(b"HTTP/1.1 200") == 2 and b"/next" in text
                    assert f'"path": "/u", "size": {len(body)}'.encode() in text


def test_tiny_chunks_do_not_hold_others_up() -> None:
    """Each byte of a body in a chunk of its own."""
    with backend() as server, server.dial() as hog, server.dial() as other:
        chunks = b"1\r\nx\r\n" * 500_000
        sender = threading.Thread(
            target=hog.sendall,
            args=(request("/", "Transfer-Encoding: chunked", method="POST") + chunks,),
        )
        sender.start()
        worst = 0.0
        while sender.is_alive():
            began = time.monotonic()
            other.sendall(request())
            assert other.recv(65536)
            worst = max(worst, time.monotonic() - began)
        sender.join()
        assert worst < 0.25


def test_watch_checks_every_connection() -> None:
    class Checked:
        times = 0

        def check(self, now: float) -> None:
            self.times += 1

    async def run() -> list[int]:
        many = [Checked(), Checked()]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watch(many), 1.5)
        return [c.times for c in many]

    assert asyncio.run(run()) == [1, 1]
