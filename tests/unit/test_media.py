"""Pictures that requests bring: forms of URLs, hostile files, hosts that may not be fetched from."""

from __future__ import annotations

import base64
import io
import itertools
import socket
import ssl
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from PIL import Image

from octavo.errors import RequestError
from octavo.generate.fetch import fetch, is_public
from octavo.generate.media import MediaPolicy, read_media
from octavo.text.messages import read_messages
from octavo.vision.decode import most_pieces
from octavo.vision.llava import LlavaPreprocessor
from octavo.vision.resize import Framing

AT = "messages[0].content[0].image_url"
MODEL: Any = SimpleNamespace(images=LlavaPreprocessor("<image>", 7, 4, Framing(size=(28, 28))))


def file(kind: str = "PNG", size: tuple[int, int] = (20, 10), **options: Any) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (250, 20, 20)).save(out, kind, **options)
    return out.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def read(*urls: Any, policy: MediaPolicy | None = None, model: Any = MODEL) -> list[Any]:
    parts = [{"type": "image_url", "image_url": url} for url in urls]
    return read_media(read_messages([{"role": "user", "content": parts}]), model, policy)


def refused(url: Any, policy: MediaPolicy | None = None) -> RequestError:
    with pytest.raises(RequestError) as e:
        read(url, policy=policy)
    assert str(e.value.param).startswith(AT) and AT in str(e.value)
    assert e.value.status == 400 and "0x" not in str(e.value) and len(str(e.value)) < 300
    return e.value


def test_pictures_are_read() -> None:
    (a, b) = read({"url": data_url(file())}, data_url(file("JPEG"), "image/jpeg;charset=x"))
    assert a.text == b.text == "<image>" * 4
    assert a.images[0].shape == (1, 28, 28, 3) and a.images[0].size == (10, 20)
    assert {tuple(p) for p in a.images[0].array.reshape(-1, 3)} == {(250, 20, 20)}
    assert a.images[0].digest != read(data_url(file(size=(10, 20))))[0].images[0].digest
    assert read(data_url(file()))[0].images[0].digest == a.images[0].digest


def test_pictures_in_python(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(file())
    parts = [{"type": "image", "image": v} for v in (path, file(), Image.open(io.BytesIO(file())))]
    found = read_media(read_messages([{"role": "user", "content": parts}]), MODEL)
    assert len({f.images[0].digest for f in found}) == 1 and len(found) == 3


FORMS: dict[str, Any] = {
    "nothing": None,
    "number": 3,
    "empty": "",
    "no comma": "data:image/png;base64",
    "no base64": "data:image/png,abc",
    "text": "data:text/plain;base64,YQ==",
    "padding": "data:image/png;base64,YQ=",
    "alphabet": "data:image/png;base64,Y*==",
    "spaces": "data:image/png;base64, YQ==",
    "empty file": "data:image/png;base64,",
    "random": data_url(bytes(range(256)) * 16),
    "zeros": "data:image/png;base64," + "A" * (1 << 20),
    "long type": "data:image/" + "a" * (1 << 20) + ";base64,YQ==",
    "file": "file:///etc/passwd",
    "path": "/etc/passwd",
    "ftp": "ftp://host/a.png",
    "gopher": "gopher://host/",
    "relative": "//127.0.0.1/a.png",
    "no url": {"detail": "auto"},
    "pdf": data_url(b"%PDF-1.7\n" + b"0" * 100),
    "svg": data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"),
    "eps": data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n"),
    "tiff": data_url(file("TIFF")),
    "bmp": data_url(file("BMP")),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    refused(FORMS[form])


@pytest.mark.parametrize("detail", ["low", "high", "huge", 3])
def test_detail(detail: Any) -> None:
    """LLaVA has one resolution."""
    assert refused({"url": data_url(file()), "detail": detail}).param == AT + ".detail"
    assert read({"url": data_url(file()), "detail": "auto"})


def test_number_of_images() -> None:
    assert len(read(*[data_url(file())] * 16)) == 16
    with pytest.raises(RequestError, match="10,000 images; 16 at most") as e:
        read(*["data:image/png;base64,AAAA"] * 10_000)
    assert e.value.param == "messages[0].content[16].image_url"


def test_models_of_text() -> None:
    with pytest.raises(RequestError, match="takes text only") as e:
        read(data_url(file()), model=SimpleNamespace(images=None))
    assert (e.value.param, e.value.code) == ("messages[0].content[0].type", "unsupported_parameter")


# -- hostile files ----------------------------------------------------------------------------


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, depth: int, color: int, body: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + body + chunk(b"IEND", b"")


def animation(kind: str, frames: int) -> bytes:
    out = io.BytesIO()
    pictures = [Image.new("RGB", (8, 8), (i * 90 % 256, i // 256, 0)) for i in range(frames)]
    pictures[0].save(out, kind, save_all=True, append_images=pictures[1:])
    return out.getvalue()


def webp_header(width: int, height: int) -> bytes:
    body = b"VP8X" + struct.pack("<I", 10) + b"\0" * 4
    body += (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


HOSTILE = {
    "png bomb": lambda: png(40_000, 40_000, 1, 0, chunk(b"IDAT", zlib.compress(bytes(5001 * 40_000), 1))),
    "png of nothing": lambda: png(0, 10, 8, 2, chunk(b"IDAT", zlib.compress(b""))),
    "png of no body": lambda: png(30, 30, 8, 2, b""),
    "webp bomb": lambda: webp_header(16_383, 16_383),
    "lossless webp bomb": lambda: b"RIFF\0\0\0\0WEBPVP8L\0\0\0\0\x2f" + b"\xff" * 40,
    "gif frames": lambda: animation("GIF", 10_000),
    "png frames": lambda: animation("PNG", 3),
    "webp frames": lambda: animation("WEBP", 3),
    "jpeg head": lambda: b"\xff\xd8\xff\xe0" + b"\0" * 64,
    "gif head": lambda: b"GIF89a" + b"\xff" * 32,
    "jpeg filler": lambda: b"\xff\xd8" + b"\xff" * (1 << 23),
    "jpeg comments": lambda: b"\xff\xd8" + b"\xff\xfe\0\2" * (1 << 21),
    "png chunks": lambda: png(8, 8, 8, 2, chunk(b"aaAa", b"") * (1 << 19)),
    "gif filler": lambda: b"GIF89a\1\0\1" + bytes(1 << 22),
}  # fmt: skip


def calls(work: Callable[[], object]) -> int:
    """Functions that are called meanwhile: how much a reader in Python does."""
    count = itertools.count()
    sys.setprofile(lambda *_: next(count))
    try:
        work()
    finally:
        sys.setprofile(None)
    return next(count)


def refused_soon(data: bytes, refuse: Callable[[str], object]) -> None:
    """Without memory for pictures, and without a look at each of millions of parts."""
    url, process = data_url(data), psutil.Process()
    refuse(data_url(png(0, 1, 8, 2, b"")))  # Pillow is loaded
    before, most = process.memory_info().rss, 50 * most_pieces(len(data))
    assert calls(lambda: refuse(url)) < most
    assert process.memory_info().rss - before < 32 << 20


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name: str) -> None:
    """Refused by what the header says."""
    refused_soon(HOSTILE[name](), refused)


@pytest.mark.parametrize("size", [(1, 1), (1, 4000), (4000, 1)], ids=str)
def test_odd_shapes(size: tuple[int, int]) -> None:
    assert read(data_url(file(size=size)))[0].images[0].shape == (1, 28, 28, 3)


def test_proportions() -> None:
    """A line whose shorter side would become 336 pixels is refused before it is resized."""
    model = SimpleNamespace(
        images=LlavaPreprocessor("<image>", 7, 4, Framing(shortest=336, crop=(336, 336)))
    )
    with pytest.raises(RequestError, match="336 x 6,720,000 pixels"):
        read(data_url(file(size=(1, 20_000))), model=model)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_truncated(kind: str) -> None:
    noise = Image.effect_noise((64, 48), 90).convert("RGB")
    out = io.BytesIO()
    noise.save(out, kind)
    whole = out.getvalue()
    for sixteenth in range(16):
        refused(data_url(whole[: len(whole) * sixteenth // 16]))
    assert read(data_url(whole))


def test_polyglots() -> None:
    """What follows a picture, or is hidden in it, is of no consequence."""
    digest = read(data_url(file()))[0].images[0].digest
    for tail in (b"PK\x03\x04" + b"\0" * 64, b"%PDF-1.7", b"<script>alert(1)</script>"):
        assert read(data_url(file() + tail))[0].images[0].digest == digest


# -- hosts ------------------------------------------------------------------------------------


class Host:
    """A server of bytes on loopback, which counts its visitors."""

    def __init__(self, *answer: bytes, pause: float = 0) -> None:
        self.hits, self._answer, self._pause = 0, answer, pause
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
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

    def make(*answer: bytes, pause: float = 0) -> Host:
        made.append(Host(*answer, pause=pause))
        return made[-1]

    yield make
    for one in made:
        one.close()


def response(body: bytes, head: str = "200 OK", **headers: str) -> bytes:
    given = {"Content-Length": str(len(body))} | {
        k.replace("_", "-"): v for k, v in headers.items()
    }
    lines = [f"HTTP/1.1 {head}", *(f"{k}: {v}" for k, v in given.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def local(name: str, port: int) -> list[str]:
    return ["127.0.0.1"]


def get(port: int, seconds: float = 5.0, **changes: Any) -> bytes:
    """A file of a host on loopback, as if that were a public address."""
    given = {"resolve": local, "allowed": lambda _: True, "seconds": seconds} | changes
    return fetch(f"http://allowed.test:{port}/a.png?b=1", ("allowed.test",), AT, **given)


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


@pytest.mark.parametrize("first", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "])
def test_slow_hosts(host: Any, first: bytes) -> None:
    """A byte at a time, in the head or in the body, ends when the time is up."""
    one, began = host(first, *[b"a"] * 100, pause=0.05), time.monotonic()
    with pytest.raises(RequestError, match="took over 0.5 seconds"):
        get(one.port, seconds=0.5)
    assert time.monotonic() - began < 3


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
    refused(url.replace("PORT", str(one.port)), MediaPolicy(domains=domains))
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


def test_tls_is_verified(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With https, the host's certificate is that of its name."""
    names: list[str] = []

    def wrap(self: ssl.SSLContext, sock: socket.socket, server_hostname: str) -> socket.socket:
        assert self.verify_mode == ssl.CERT_REQUIRED and self.check_hostname
        names.append(server_hostname)
        return sock

    monkeypatch.setattr(ssl.SSLContext, "wrap_socket", wrap)
    one = host(response(file()))
    url = f"https://Allowed.test:{one.port}"
    assert fetch(url, ("allowed.test",), AT, resolve=local, allowed=lambda _: True) == file()
    assert names == ["allowed.test"]
