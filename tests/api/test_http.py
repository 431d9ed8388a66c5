"""A server among hostile, clumsy and unusual clients, with one that asks for its health all along."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.api.server import Server, serving
from tests.waiting import until

STALL = 0.25  # seconds that health may take on a busy machine
USER = [{"role": "user", "content": "Count upwards from one, in words."}]


class Canary:
    """Asks whether the server lives, again and again.

    An answer that is late because others have the machine's cores is not the server's fault: of each
    wait only what the front's process computed in it counts.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sing)
        self.times: list[float] = []
        self.failures: list[str] = []

    def _sing(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=30)
        front = psutil.Process(self._server.process.pid)
        while not self._done.wait(0.002):
            began, computed = time.monotonic(), sum(front.cpu_times()[:2])
            try:
                connection.request("GET", "/health/live")
                response = connection.getresponse()
                response.read()
                if response.status != 200:
                    self.failures.append(str(response.status))
            except (OSError, http.client.HTTPException) as e:
                self.failures.append(type(e).__name__)
                connection.close()
            busy = sum(front.cpu_times()[:2]) - computed
            self.times.append(min(time.monotonic() - began, busy))
        connection.close()

    def __enter__(self) -> Canary:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()


@contextmanager
def canary(server: Server, bound: float = STALL) -> Iterator[None]:
    with Canary(server) as bird:
        yield
        time.sleep(0.2)
    assert not bird.failures and len(bird.times) > 3
    assert max(bird.times) < bound


def raw(server: Server, data: bytes, half: bool = False) -> bytes:
    """All that the server answers to some bytes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(data)
        if half:
            sock.shutdown(socket.SHUT_WR)
        out = b""
        while chunk := sock.recv(65536):
            out += chunk
        return out


def answer(sock: socket.socket) -> bytes:
    """One answer on a connection that stays open."""
    out = b""
    while b"\r\n\r\n" not in out:
        out += sock.recv(65536)
    head = out.partition(b"\r\n\r\n")[0]
    size = int(re.findall(rb"content-length: (\d+)", head)[0])
    while len(out) < len(head) + 4 + size:
        out += sock.recv(65536)
    return out


def post(path: str, body: Any, *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + data


def chat(**changes: Any) -> dict[str, Any]:
    return {"messages": USER, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | changes


def error(text: bytes) -> tuple[int, str | None]:
    head, _, body = text.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


# -- what hurts others ------------------------------------------------------------------------


def test_a_header_of_64_mib(server: Server) -> None:
    with canary(server), socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: ")
        with pytest.raises(OSError):
            for _ in range(1024):
                sock.sendall(b"a" * 65536)
                time.sleep(0.0005)
    answer = raw(server, b"GET /health HTTP/1.1\r\nA: " + b"a" * 300_000)
    assert error(answer) == (431, "headers_too_large")


COSTLY = {
    "numbers": b'{"prompt":[' + b"1," * 4_000_000 + b"1]}",
    "lists": b'{"prompt":[' + b"[]," * 2_700_000 + b"[]]}",
    "objects": b'{"messages":[' + b"{}," * 2_700_000 + b"{}]}",
    "texts": b'{"prompt":[' + b'"a",' * 2_000_000 + b'"a"]}',
    "keys": b'{"logit_bias":{' + b",".join(b'"%d":1' % i for i in range(700_000)) + b"}}",
    "fields": b"{" + b",".join(b'"%d":1' % i for i in range(700_000)) + b"}",
    "depth": b'{"prompt":' + b"[" * 8_000_000,
}  # fmt: skip


@pytest.mark.parametrize("kind", COSTLY)
def test_costly_bodies(server: Server, kind: str) -> None:
    data = COSTLY[kind]
    assert len(data) <= 8 << 20
    with canary(server):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            status, reply = server.post(path, data)
            assert status in (400, 413) and reply["error"]["message"], (path, status)


def test_many_ids_that_are_too_many(server: Server) -> None:
    """Sizes are looked at before contents: as many ids as a body takes, for many choices."""
    ids = b"1," * 990_000 + b"1"
    with canary(server):
        for body in (b'{"n":128,"prompt":[%b]}', b'{"prompt":"a","allowed_token_ids":[%b]}'):
            status, reply = server.post("/v1/completions", body % ids)
            assert status == 400 and reply["error"]["param"], reply


def test_streams_and_answers_of_others_go_on(server: Server) -> None:
    """A stream while all kinds of abuse go on has the tokens that it has alone."""
    golden = server.post("/v1/chat/completions", chat(max_tokens=120))[1]
    results: list[Any] = []
    body = chat(max_tokens=120)
    singer = threading.Thread(
        target=lambda: results.append(server.post("/v1/chat/completions", body)[1])
    )
    singer.start()
    for _ in range(3):
        raw(server, b"GET /\0 HTTP/1.1\r\n\r\n")
        raw(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 300)
        server.post("/v1/completions", COSTLY["lists"])
    singer.join()
    assert results[0]["choices"] == golden["choices"]


def test_pipelined_requests(server: Server) -> None:
    one = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with canary(server):
        text = raw(server, one * 20_000)
    assert text.count(b"HTTP/1.1 200") >= 1


def test_more_clients_than_handles(smollm2: Path, tmp_path: Path) -> None:
    """A thousand connections that say nothing, or little, while the process has 256 handles."""
    with serving("smollm2", "--offline", log=tmp_path / "log", handles=256) as s:
        crowd = []
        try:
            for i in range(1000):
                sock = socket.create_connection(("127.0.0.1", s.port), timeout=10)
                sock.sendall((b"", b"GET /v1/mod", post("/tokenize", {"prompt": "a"})[:-2])[i % 3])
                crowd.append(sock)
            assert s.post("/v1/chat/completions", chat())[0] == 200
            assert s.get("/v1/models")[0] == 200
        finally:
            for sock in crowd:
                sock.close()
        assert s.post("/v1/chat/completions", chat())[0] == 200
        s.wait_idle()


def test_streams_that_are_not_read_give_back_their_place(smollm2: Path, tmp_path: Path) -> None:
    options = ("--max-queue", "2", "--write-timeout", "2", "--context", "4096")
    with serving("smollm2", "--offline", *options, log=tmp_path / "log") as s, ExitStack() as stack:
        body = chat(stream=True, max_tokens=3000, logprobs=True, top_logprobs=20)
        for _ in range(2):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", s.port))
            sock.sendall(post("/v1/chat/completions", body))
        until(lambda: s.metric("octavo_requests_running") >= 2)  # asked in no place of the queue
        assert s.post("/v1/chat/completions", chat())[0] == 503
        until(lambda: s.post("/v1/chat/completions", chat())[0] == 200)
        s.wait_idle()
    assert len(re.findall(r" ms  499\b", (tmp_path / "log").read_text())) == 2


# -- clients of all kinds ---------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_half_closed_clients_get_their_answer(server: Server, stream: bool) -> None:
    body = chat(stream=stream, max_tokens=40)
    whole = raw(server, post("/v1/chat/completions", body, "Connection: close"))
    half = raw(server, post("/v1/chat/completions", body, "Connection: close"), half=True)
    varying = re.compile(
        rb'"id":"[^"]*"|"created":\d+|(?:date|x-request-id): [^\r]*|"cached_tokens":\d+'
    )
    assert varying.sub(b"", half) == varying.sub(b"", whole)
    assert half.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("stream", [False, True])
def test_closed_clients_stop_their_request(server: Server, stream: bool) -> None:
    server.wait_idle()
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.sendall(post("/v1/chat/completions", chat(stream=stream, max_tokens=2000)))
    time.sleep(0.5)
    assert server.metric("octavo_requests_running") == 1
    sock.close()
    server.wait_idle(2)


def test_paths_without_v1(server: Server) -> None:
    for path, body in (
        ("/chat/completions", chat()),
        ("/completions", {"prompt": "a", "max_tokens": 2}),
        ("/embeddings", {"input": "a"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
    ):
        for prefix in ("", "/v1"):
            status, reply = server.post(prefix + path, body)  # and without a model: there is one
            assert status == 200 and reply["model" if "model" in reply else "id"]
    assert json.loads(server.get("/models")[1]) == json.loads(server.get("/v1/models")[1])
    assert server.get("/models/smollm2")[0] == 200


def test_errors_are_json(server: Server) -> None:
    assert error(raw(server, b"NONSENSE\r\n\r\n")) == (400, "invalid_http")
    no_host = b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n"
    assert error(raw(server, no_host)) == (400, "invalid_host")
    assert raw(server, b"GET /v1/models HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")
    response = httpx.get(server.url + "/v1/chat/completions")
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    assert response.json()["error"]["message"]


def test_models_while_loading(smollm2: Path, tmp_path: Path) -> None:
    """The port answers before the model is there, and says so."""
    server = Server("smollm2", "--offline", log=tmp_path / "log")
    try:
        seen = []
        while server.get("/health/ready")[0] != 200:
            status, text = server.get("/v1/models")
            if status and status != 200:
                seen.append((status, json.loads(text)["error"]["code"]))
        assert set(seen) == {(503, "loading")}
        assert json.loads(server.get("/v1/models")[1])["data"]
    finally:
        server.stop()


# -- the end ----------------------------------------------------------------------------------


def drained(s: Server, *signals: int) -> dict[str, bytes]:
    """What a stream and a whole answer of a server get that is told to stop."""
    out: dict[str, bytes] = {}

    def ask(name: str, stream: bool) -> None:
        body = chat(stream=stream, max_tokens=6000)
        try:
            out[name] = raw(s, post("/v1/chat/completions", body, "Connection: close"))
        except ConnectionError:
            out[name] = b""

    threads = [threading.Thread(target=ask, args=a) for a in (("stream", True), ("whole", False))]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    for sig in signals:
        os.kill(s.process.pid, sig)
        time.sleep(0.3)
    for thread in threads:
        thread.join(20)
    return out


def test_the_end_of_draining_is_told(smollm2: Path, tmp_path: Path) -> None:
    with serving("smollm2", "--offline", "--drain-timeout", "1", log=tmp_path / "log") as s:
        out = drained(s, signal.SIGTERM)
        assert s.process.wait(10) == 0
    frames = re.findall(rb"^data: (.*)$", out["stream"], re.M)
    assert frames[-1] == b"[DONE]"
    assert json.loads(frames[-2])["error"]["code"] == "shutting_down"
    assert out["stream"].endswith(b"0\r\n\r\n")
    assert error(out["whole"]) == (503, "shutting_down")


def test_the_second_signal_ends_at_once(smollm2: Path, tmp_path: Path) -> None:
    with serving("smollm2", "--offline", "--drain-timeout", "60", log=tmp_path / "log") as s:
        began = time.monotonic()
        drained(s, signal.SIGINT, signal.SIGINT)
        assert s.process.wait(10) == 0
        assert time.monotonic() - began < 8


# -- code from the current folder -------------------------------------------------------------


def test_the_current_folder_is_not_imported_from(smollm2: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    trap = f"open({str(marker)!r}, 'a').write(__name__ + ' ')\n"
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in (
        "ctypes json numpy llguidance msgspec octavo signal socket select uvicorn tokenizers sitecustomize"
    ).split():
        (folder / f"{name}.py").write_text(trap + "raise ImportError\n")
    with serving("smollm2", "--offline", log=tmp_path / "log", cwd=folder) as s:
        body = chat(structured_outputs={"regex": "[a-z]{3}"})
        status, reply = s.post("/v1/chat/completions", body)  # starts the grammar worker too
        assert status == 200 and len(reply["choices"][0]["message"]["content"]) == 3
    assert not marker.exists()


def test_pythonpath_still_counts(smollm2: Path, tmp_path: Path) -> None:
    """What is left out is the current folder alone."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nopen({str(tmp_path / 'seen')!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with serving("smollm2", "--offline", log=tmp_path / "log", env={"PYTHONPATH": path}) as s:
        pids = (tmp_path / "seen").read_text().split()
        assert {str(s.process.pid), str(s.engine().pid)} <= set(pids)


# -- who may ask ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With API keys, an admin's, web pages and a name."""
    folder = tmp_path_factory.mktemp("guarded")
    options = (
        "--api-key", "user-key", "--admin-key", "admin-key", "--cors-origin", "https://app.example.com",
        "--allowed-host", "models.example.com", "--lora-dir", str(folder), "--log-format", "json",
        "--log-level", "debug",
    )  # fmt: skip
    with serving("smollm2", "--offline", *options, log=folder / "log") as s:
        yield s


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def test_adapters_need_the_admins_key(guarded: Server) -> None:
    body = {"lora_name": "a", "lora_path": "a"}
    for path in ("/v1/load_lora_adapter", "/unload_lora_adapter"):
        assert guarded.post(path, body)[0] == 401
        assert guarded.post(path, body, key("wrong"))[0] == 401
        status, reply = guarded.post(path, body, key("user-key"))
        assert (status, reply["error"]["code"]) == (403, "admin_key_required")
        status, reply = guarded.post(
            path, body if "un" not in path else {"lora_name": "a"}, key("admin-key")
        )
        assert (status, reply["error"]["param"]) == (
            400,
            "lora_path" if "un" not in path else "lora_name",
        )
    assert guarded.post("/v1/chat/completions", chat(), key("admin-key"))[0] == 200


def test_without_an_admins_key_adapters_stay(smollm2: Path, tmp_path: Path) -> None:
    body = {"lora_name": "a", "lora_path": "a"}
    options = ("--api-key", "k", "--lora-dir", str(tmp_path))
    with serving("smollm2", "--offline", *options, log=tmp_path / "log") as s:
        assert s.post("/v1/load_lora_adapter", body, key("k"))[0] == 403
        assert s.post("/v1/unload_lora_adapter", {"lora_name": "a"}, key("k"))[0] == 403


def test_401_comes_before_the_body(guarded: Server) -> None:
    """A client that announces 8 MiB has its answer before it has sent any; so has one that must not
    wait for leave to send."""
    for more in ("", "Expect: 100-continue\r\n"):
        with socket.create_connection(("127.0.0.1", guarded.port), timeout=10) as sock:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{more}Content-Length: {8 << 20}\r\n\r\n"
            sock.sendall(head.encode())
            text = answer(sock)
            assert error(text) == (401, "invalid_api_key") and b"www-authenticate: Bearer" in text


@pytest.mark.parametrize(
    "lines",
    [
        ["Authorization: Bearer user-key", "Authorization: Bearer user-key"],
        ["Authorization: Bearer user-key", "Authorization: Bearer wrong"],
        ["Authorization: Bearer  "], ["Authorization: Bearer"], ["Authorization: user-key"], ["Authorization: Basic user-key"],
        ["Authorization: Bearer user-key, Bearer admin-key"], ["Authorization: Bearer user-key\xff"], ["X-Api-Key: wrong"],
        ["X-Api-Key: user-key", "X-Api-Key: user-key"], ["Authorization: Bearer wrong", "X-Api-Key: user-key"],
        ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="],
    ],
)  # fmt: skip
def test_odd_credentials(guarded: Server, lines: list[str]) -> None:
    head = ["GET /v1/models HTTP/1.1", "Host: localhost", *lines, "X: close", "", ""]
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=10) as sock:
        sock.sendall("\r\n".join(head).encode("latin-1"))
        assert error(answer(sock)) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True), ("127.0.0.1:8000", True), ("[::1]:8000", True), ("models.example.com", True),
        ("MODELS.example.com:443", True), ("localhost.", True), ("a.localhost:1", True), ("192.168.1.4:80", True),
        ("evil.example.net", False), ("localhost.evil.net", False), ("127.0.0.1.evil.net", False), ("", False),
        ("evil@localhost", False), ("localhost/evil.net", False), ("evil.net:x", False), ("[::1", False),
    ],
)  # fmt: skip
def test_names_of_the_server(guarded: Server, host: str, allowed: bool) -> None:
    text = raw(
        guarded,
        f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer user-key\r\nConnection: close\r\n\r\n".encode(),
    )
    assert int(text.split()[1]) == (200 if allowed else 403), text


def test_pages_of_other_hosts_cannot_use_a_local_server(server: Server) -> None:
    """What any page can send without asking: a form's content type."""
    headers = {"content-type": "text/plain", "origin": "https://evil.example.net"}
    status, reply = server.post("/v1/chat/completions", chat(), headers)
    assert (status, reply["error"]["code"]) == (403, "origin_not_allowed")
    assert "--cors-origin" in reply["error"]["message"]
    status, reply = server.post(
        "/v1/chat/completions", chat(), {"host": f"rebound.example.net:{server.port}"}
    )
    assert (status, reply["error"]["code"]) == (403, "host_not_allowed")
    assert "--allowed-host" in reply["error"]["message"]
    own = {"origin": server.url}
    assert server.post("/v1/chat/completions", chat(), own)[0] == 200


def test_pages_that_may(guarded: Server) -> None:
    """As a browser does: a preflight without the key, then the request with it, streamed."""
    origin = {"origin": "https://app.example.com"}
    asked = "authorization,content-type,x-stainless-arch,x-stainless-retry-count"
    url = guarded.url + "/v1/chat/completions"
    preflight = httpx.options(
        url,
        headers=origin
        | {"access-control-request-method": "POST", "access-control-request-headers": asked},
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == origin["origin"]
    assert preflight.headers["access-control-allow-headers"] == asked
    assert "POST" in preflight.headers["access-control-allow-methods"]
    for stream in (False, True):
        reply = httpx.post(url, json=chat(stream=stream), headers=origin | key("user-key"))
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == origin["origin"]
    refused = httpx.post(url, json=chat(), headers=origin)  # the page can read why
    assert (
        refused.status_code == 401
        and refused.headers["access-control-allow-origin"] == origin["origin"]
    )
    other = httpx.options(
        url, headers={"origin": "https://evil.net", "access-control-request-method": "POST"}
    )
    assert other.status_code == 403 and "access-control-allow-origin" not in other.headers
    assert other.json()["error"]["code"] == "origin_not_allowed"


@pytest.mark.parametrize(
    "options",
    [
        ("--api-key", ""), ("--api-key", "a", "--admin-key", "a"), ("--admin-key", " "),
        ("--cors-origin", "example.com"), ("--cors-origin", "https://example.com/app"),
    ],
)  # fmt: skip
def test_options_that_guard_nothing(options: tuple[str, ...], tmp_path: Path) -> None:
    server = Server("smollm2", "--offline", *options, log=tmp_path / "log")
    assert server.process.wait(20) == 2
    server.stop()
    assert (tmp_path / "log").read_text().startswith("error: ")


def test_a_public_server_has_any_name(smollm2: Path, tmp_path: Path) -> None:
    with serving(
        "smollm2", "--offline", "--host", "0.0.0.0", "--cors-origin", "*", log=tmp_path / "log"
    ) as s:
        reply = httpx.post(
            s.url + "/v1/chat/completions", json=chat(),
            headers={"host": "anything.example.org", "origin": "https://a.example"},
        )  # fmt: skip
        assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == "*"
