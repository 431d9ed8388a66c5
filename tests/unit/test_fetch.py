"""Pictures that are fetched: from allowed hosts with public addresses alone, and in time."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from octavo.errors import RequestError
from octavo.generate.fetch import Fetcher, is_public
from octavo.generate.lookup import Lookups
from octavo.generate.media import FETCHES, THREADS, MediaPolicy, MediaReader
from octavo.generate.request import GenerationRequest
from octavo.text.messages import read_messages
from tests.unit.test_media import AT, MODEL, data_url, file, read, refused


class Host:
    """A server of bytes on loopback, which counts its visitors."""

    def __init__(
        self, *answer: bytes, pause: float = 0, tls: trustme.LeafCert | None = None
    ) -> None:
        self.hits, self.sent, self._answer, self._pause = 0, 0, answer, pause
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.configure_cert(context)
            self._socket = context.wrap_socket(self._socket, server_side=True)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.hits += 1
            try:
                with connection:
                    connection.recv(4096)
                    for piece in self._answer:
                        connection.sendall(piece)
                        self.sent += 1
                        time.sleep(self._pause)
            except OSError:
                continue

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)


@pytest.fixture
def host() -> Iterator[Any]:
    made: list[Host] = []

    def make(*answer: bytes, **options: Any) -> Host:
        made.append(Host(*answer, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> trustme.CA:
    """Who signs certificates that this machine trusts."""
    made, file = trustme.CA(), tmp_path / "trusted.pem"
    made.cert_pem.write_to_path(str(file))
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    return made


def response(body: bytes, head: str = "200 OK", **headers: str) -> bytes:
    given = {"Content-Length": str(len(body))} | {
        k.replace("_", "-"): v for k, v in headers.items()
    }
    lines = [f"HTTP/1.1 {head}", *(f"{k}: {v}" for k, v in given.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def local(host: str) -> list[str]:
    return ["127.0.0.1"]


def get(port: int, scheme: str = "http", resolve: Any = local, **changes: Any) -> bytes:
    """A file of a host on loopback, as if that were a public address."""
    given: Any = {"lookups": Lookups(resolve), "allowed": lambda _: True} | changes
    return Fetcher(("allowed.test",), **given).fetch(f"{scheme}://Allowed.test:{port}/a?b=1", AT)


def test_an_allowed_host(host: Any) -> None:
    one = host(response(file()))
    assert get(one.port) == file() and one.hits == 1


ANSWERS = {
    "redirect": response(b"", "302 Found", Location="http://127.0.0.1/"),
    "missing": response(b"no", "404 Not Found"),
    "compressed": response(b"x", Content_Encoding="gzip"),
    "short": response(b"abc", Content_Length="10"),
    "no http": b"SSH-2.0-OpenSSH_9.2\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\nX: " + b"a" * (1 << 17),
    "endless": b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * (22 << 20),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_of_hosts(host: Any, name: str) -> None:
    one = host(ANSWERS[name])
    with pytest.raises(RequestError) as e:
        get(one.port)
    assert e.value.param == AT and one.hits == 1


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("first", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "])
def test_slow_hosts(host: Any, first: bytes, scheme: str, authority: trustme.CA) -> None:
    """A byte at a time, in the head or in the body, ends when the time is up."""
    tls = authority.issue_cert("allowed.test") if scheme == "https" else None
    one = host(first, *[b"a"] * 100, pause=0.05, tls=tls)
    with pytest.raises(RequestError) as e:
        get(one.port, scheme, seconds=0.5)
    assert str(e.value) == f"{AT}: the image took over 0.5 seconds" and 1 < one.sent < 100


def test_a_resolver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps a thread of its own, however many ask, and no thread of those that read pictures."""
    asked, known, answer = [], socket.getaddrinfo, threading.Event()

    def hang(host: str, *given: Any, **more: Any) -> Any:
        if host != "allowed.test":
            return known(host, *given, **more)
        asked.append(host)
        answer.wait()
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    def lookups() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "octavo-lookup"]

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    policy = MediaPolicy(fetcher=Fetcher(("allowed.test",), seconds=0.2))
    late = [str(refused("http://allowed.test/a.png", policy)) for _ in range(3)]
    assert late == [f"{AT}: the image took over 0.2 seconds"] * 3
    assert asked == ["allowed.test"] and [thread.daemon for thread in lookups()] == [True]
    assert len(read(data_url(file()), policy=policy)) == 1
    answer.set()
    for thread in lookups():
        thread.join()
    again = str(refused("http://allowed.test/a.png", policy))
    assert again == f"{AT}: the image could not be fetched" and len(asked) == 2


class Waiting:
    """A host on loopback with `most` visitors at a time, who are answered once it is `opened`."""

    def __init__(self, answer: bytes, most: int) -> None:
        self.opened, self.visitors = threading.Event(), threading.Semaphore(0)
        self._socket, self._answer = socket.create_server(("127.0.0.1", 0)), answer
        self.port = self._socket.getsockname()[1]
        for _ in range(most):
            threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.recv(4096)
                self.visitors.release()
                self.opened.wait()
                connection.sendall(self._answer)

    def close(self) -> None:
        self.opened.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def test_slow_hosts_hold_up_no_other_picture() -> None:
    """A picture that is not fetched is read while as many fetches as there may be wait, and more
    than those for their turn; these are read in their order once their host answers."""
    slow = Waiting(response(file()), FETCHES)
    fetcher = Fetcher(("allowed.test",), lookups=Lookups(local), allowed=lambda _: True, seconds=60)
    reader, done = MediaReader(MediaPolicy(fetcher=fetcher)), []

    async def read_one(name: str, url: str) -> list[Any]:
        part = {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}
        messages = read_messages([{"role": "user", "content": [part]}])
        found = await reader.read(GenerationRequest(messages=messages), MODEL)
        done.append(name)
        return [image.digest for p in found.media or () for image in p.images]

    async def run() -> list[list[Any]]:
        url = f"http://allowed.test:{slow.port}/"
        late = [asyncio.create_task(read_one("fetched", url)) for _ in range(FETCHES + THREADS)]
        for _ in range(FETCHES):
            assert await asyncio.to_thread(slow.visitors.acquire, timeout=30)
        own = [await read_one("sent", data_url(file())) for _ in range(THREADS)]
        assert not slow.visitors.acquire(blocking=False)
        slow.opened.set()
        return own + await asyncio.gather(*late)

    try:
        digests = asyncio.run(run())
    finally:
        slow.close()
    assert done == ["sent"] * THREADS + ["fetched"] * (FETCHES + THREADS)
    assert digests == [digests[0]] * len(done) and len(digests[0]) == 1


def test_more_than_was_declared(host: Any) -> None:
    one = host(response(file(), Content_Length=str(len(file()))) + b"x" * (1 << 16))
    assert get(one.port) == file()


URLS = [
    "http://127.0.0.1:PORT/c", "http://localhost:PORT/", "http://[::1]:PORT/",
    "http://[::ffff:127.0.0.1]:PORT/", "http://2130706433:PORT/", "http://0x7f.1:PORT/",
    "http://0:PORT/", "http://169.254.169.254/latest/", "http://allowed.test\\@127.0.0.1:PORT/",
    "http://allowed.test@127.0.0.1:PORT/", "HTTP://127.0.0.1:PORT/", "//127.0.0.1:PORT/",
    "http://allowed.test#@127.0.0.1:PORT/", "http://allowed.test:PORT\r\nHost: x/", "http://",
    "http://allowed.test.:PORT/", "http://allowed.test:99999/", "https://127.0.0.1:PORT/",
    "http://allowed.test.evil.test:PORT/", "http://127.0.0.1:PORT/?allowed.test",
]  # fmt: skip


@pytest.mark.parametrize("domains", [(), ("allowed.test",)], ids=["off", "on"])
@pytest.mark.parametrize("url", URLS)
def test_urls_that_go_elsewhere(
    host: Any, url: str, domains: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is connected to, whether fetching is off or the allowed host is on loopback."""
    one = host(response(file()))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("127.0.0.1", 0))])
    refused(url.replace("PORT", str(one.port)), MediaPolicy(fetcher=Fetcher(domains)))
    assert one.hits == 0


def test_every_address_of_a_host_is_public(host: Any) -> None:
    """A host with one address inside is refused; the checked address is the one connected to."""
    one = host(response(file()))
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])  # a name that changes its meaning
    assert get(one.port, resolve=lambda *_: next(answers)) == file()
    for found in (["93.184.215.14", "127.0.0.1"], ["127.0.0.1"], []):
        with pytest.raises(RequestError, match="no public host"):
            get(one.port, resolve=lambda *_, found=found: found, allowed=is_public)
    assert one.hits == 1


@pytest.mark.parametrize("address", [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1",
    "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1",
    "::ffff:8.8.8.8", "2002:7f00:1::", "64:ff9b::7f00:1", "ff02::1",
])  # fmt: skip
def test_addresses_inside(address: str) -> None:
    assert not is_public(address)


def test_addresses_outside() -> None:
    assert is_public("93.184.215.14") and is_public("2606:2800:21f:cb07:6820:80da:af6b:8b2c")


def test_tls_is_verified(host: Any, authority: trustme.CA) -> None:
    """With https, the host's certificate is of its name and of somebody who is trusted."""
    own = host(response(file()), tls=authority.issue_cert("allowed.test"))
    assert get(own.port, "https") == file()
    for tls in (authority.issue_cert("other.test"), trustme.CA().issue_cert("allowed.test")):
        one = host(response(file()), tls=tls)
        with pytest.raises(RequestError) as e:
            get(one.port, "https")
        assert str(e.value) == f"{AT}: the image could not be fetched" and one.hits == 0


def test_nothing_is_fetched_for_a_detail_that_is_refused(host: Any) -> None:
    one = host(response(file()))
    fetcher = Fetcher(("allowed.test",), lookups=Lookups(local), allowed=lambda _: True)
    reader = MediaReader(MediaPolicy(fetcher=fetcher))

    def read_one(detail: str) -> GenerationRequest:
        url = {"url": f"http://allowed.test:{one.port}/", "detail": detail}
        parts = [{"type": "image_url", "image_url": url}]
        messages = read_messages([{"role": "user", "content": parts}])
        return asyncio.run(reader.read(GenerationRequest(messages=messages), MODEL))

    with pytest.raises(RequestError, match="one resolution") as e:
        read_one("high")
    assert e.value.param == AT + ".detail" and one.hits == 0
    assert len(read_one("auto").media or ()) == one.hits == 1
