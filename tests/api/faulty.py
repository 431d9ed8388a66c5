"""Upstreams that misbehave: real sockets, each request answered as a test wants."""

from __future__ import annotations

import json
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: "
SSE = HEAD + b"text/event-stream\r\n\r\n"
Behaviour = Callable[[socket.socket, "Faulty"], None]


def chunk(text: str) -> bytes:
    data = {"id": "x", "object": "text_completion", "created": 1, "model": "simulated",
            "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}]}  # fmt: skip
    return f"data: {json.dumps(data)}\n\n".encode()


FLOOD = chunk(" more") * 100_000 + b"data: [DONE]\n\n"  # more than sockets hold


class Faulty:
    """posts: requests that came for an answer; asked: the last, `own.asked` that which a behaviour
    is to answer. left: was set once a client closed its side."""

    def __init__(self, behaviour: Behaviour, models: bytes | None) -> None:
        self.behaviour, self.models = behaviour, models
        self.posts = 0
        self.asked = b""
        self.own = threading.local()
        self.left = threading.Event()
        self.over = threading.Event()
        self.url = ""

    def serve(self, connection: socket.socket) -> None:
        with suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                if not (data := connection.recv(65536)):
                    return
                head += data
            if head.startswith(b"POST"):
                self.posts += 1
                self.own.asked = self.asked = _whole(connection, head)
                self.behaviour(connection, self)
            elif self.models is None:
                self.over.wait()
            else:
                connection.sendall(HEAD + b"application/json\r\n\r\n" + self.models)


def _whole(connection: socket.socket, data: bytes) -> bytes:
    """A request with all of its body, of which the beginning has come."""
    head, _, _ = data.partition(b"\r\n\r\n")
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    size = len(head) + 4 + int(lines.get(b"content-length", b"0"))
    while len(data) < size and (more := connection.recv(65536)):
        data += more
    return data


@contextmanager
def faulty(
    behaviour: Behaviour, healthy: bool = True, owner: str = "somebody", model: str = "simulated"
) -> Iterator[Faulty]:
    """healthy: it says which model it has; else it takes connections and says nothing."""
    card = {"id": model, "object": "model", "created": 0, "owned_by": owner}
    models = json.dumps({"object": "list", "data": [card]}).encode() if healthy else None
    one = Faulty(behaviour, models)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            one.serve(self.request)

    class Threaded(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Threaded(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        one.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield one
        finally:
            one.over.set()
            server.shutdown()
            thread.join()


def says_nothing(connection: socket.socket, one: Faulty) -> None:
    one.over.wait()


def closes(connection: socket.socket, one: Faulty) -> None:
    pass


def resets(connection: socket.socket, one: Faulty) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def garbage(connection: socket.socket, one: Faulty) -> None:
    connection.sendall(SSE + b"\x00\x01 this is no event stream\n\n" * 4)


def no_frame(connection: socket.socket, one: Faulty) -> None:
    connection.sendall(b"zz\r\nno chunk of HTTP\r\n")
    one.over.wait(5)


def no_event(connection: socket.socket, one: Faulty) -> None:
    connection.sendall(b"%x\r\n%s\r\n" % (17, b": tokens [1,\n\n!!!"))
    one.over.wait(5)


def page(status: str) -> Behaviour:
    def answer(connection: socket.socket, one: Faulty) -> None:
        html = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-type: text/html\r\n\r\n<html>no"
        connection.sendall(html.encode())

    return answer


def only_headers(connection: socket.socket, one: Faulty) -> None:
    connection.sendall(SSE)


def breaks_off(connection: socket.socket, one: Faulty) -> None:
    connection.sendall(SSE + chunk(" one") + chunk(" two")[:20])
    time.sleep(0.05)


def says_that_it_failed(connection: socket.socket, one: Faulty) -> None:
    """As vLLM and SGLang do."""
    error = b'data: {"error":{"message":"the engine died","type":"InternalServerError","code":500}}'
    connection.sendall(SSE + chunk(" one") + error + b"\n\ndata: [DONE]\n\n")


def falls_silent(connection: socket.socket, one: Faulty) -> None:
    connection.sendall(SSE + chunk(" one"))
    one.over.wait()


def byte_by_byte(connection: socket.socket, one: Faulty) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in SSE + chunk(" one") + chunk(" two") + b"data: [DONE]\n\n":
        connection.sendall(bytes([byte]))


def goes_on_and_on(connection: socket.socket, one: Faulty) -> None:
    connection.sendall(SSE)
    try:
        while not one.over.wait(0.02):
            connection.sendall(chunk(" more"))
    except OSError:
        one.left.set()


def floods(connection: socket.socket, one: Faulty) -> None:
    connection.sendall(SSE + FLOOD)


def never_closes(tells: bool) -> Behaviour:
    """Says all of an answer, and nothing of the end of its body. tells: of tokens, as Octavo does."""
    tokens = b": tokens [1]\n\n" if tells else b""
    usage = b': usage {"prompt_tokens":1,"completion_tokens":2}\n\n' if tells else b""

    def answer(connection: socket.socket, one: Faulty) -> None:
        said = chunk(" one") + tokens + chunk(" two") + b"data: [DONE]\n\n" + usage
        connection.sendall(SSE[:-2] + b"content-length: 100000\r\n\r\n" + said)
        one.over.wait(0.5)
        resets(connection, one)

    return answer


def proxy(
    port: int, parts: int, spoil: Behaviour, size: int = 65536, pause: float = 0.0
) -> Behaviour:
    """What the server at a port answers, up to so many parts of the stream, then a fault. size: of
    what is sent at a time. pause: seconds before each."""

    def answer(connection: socket.socket, one: Faulty) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        had = 0
        with socket.create_connection(("127.0.0.1", port)) as behind:
            behind.sendall(one.own.asked.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
            while data := behind.recv(65536):
                for start in range(0, len(data), size):
                    if pause:
                        time.sleep(pause)
                    connection.sendall(data[start : start + size])
                had += data.count(b": tokens ")
                if had >= parts:
                    return spoil(connection, one)

    return answer
