"""Connections to upstreams before a real socket: which answers they read, and which they keep."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
import uvloop

from octavo.balance.breaker import Breaker
from octavo.gateway.connection import MOST_HELD, UpstreamConnection, head_of
from octavo.gateway.discovery import of_name
from octavo.gateway.errors import UpstreamFailed
from octavo.gateway.transport import Timeouts, Transport
from octavo.gateway.upstream import Place, Upstream

OK = b"HTTP/1.1 200 OK\r\n"
SIZED = OK + b"content-length: 3\r\n\r\nabc"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n"


class Answering:
    """A server that says the same bytes to every request. connections: how many were opened."""

    def __init__(self, said: bytes, parts: int, closes: bool) -> None:
        self._said, self._parts, self._closes = said, parts, closes
        self.connections = 0
        self.heads: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
                for start in range(0, len(self._said), self._parts):
                    writer.write(self._said[start : start + self._parts])
                    await writer.drain()
                if self._closes:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


def run(
    said: bytes, does: Callable[[Transport, Upstream, Answering], Awaitable[object]],
    parts: int = 1 << 20, closes: bool = False,
) -> object:  # fmt: skip
    async def test() -> object:
        answering = Answering(said, parts, closes)
        server = await asyncio.start_server(answering, "127.0.0.1", 0)
        place = Place(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        transport = Transport(Timeouts(connect=2))
        try:
            return await does(transport, Upstream(place, Breaker(lambda: 0.0)), answering)
        finally:
            await transport.close()
            server.close()

    return uvloop.run(test())


async def whole(transport: Transport, upstream: Upstream, path: str = "/x") -> bytes:
    answer = await transport.open(upstream, path, {}, b"{}", 1)
    try:
        return await answer.whole()
    finally:
        answer.close()


@pytest.mark.parametrize(
    ("said", "closes", "connections"),
    [(SIZED, False, 1), (CHUNKED, False, 1), (b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED, False, 1),
     (OK + b"connection: close\r\ncontent-length: 3\r\n\r\nabc", False, 2),
     (OK + b"\r\nabc", True, 2), (SIZED, True, 2)],
    ids=["sized", "chunked", "continue", "close", "to-its-end", "closes-unsaid"],
)  # fmt: skip
@pytest.mark.parametrize("parts", [1, 1 << 20])
def test_answers_are_read_and_sound_connections_kept(
    said: bytes, closes: bool, connections: int, parts: int
) -> None:
    async def does(transport: Transport, upstream: Upstream, answering: Answering) -> None:
        assert await whole(transport, upstream) == b"abc"
        await asyncio.sleep(0.05)  # for a connection's end to come
        assert await whole(transport, upstream) == b"abc"
        assert answering.connections == connections

    run(said, does, parts, closes)


@pytest.mark.parametrize(
    "said",
    [b"no HTTP at all\r\n\r\n", OK + b"content-length: 9\r\n\r\nabc", b"",
     OK + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
     b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"],
    ids=["garbage", "short", "nothing", "no-last-chunk", "no-chunk", "upgrade"],
)  # fmt: skip
def test_what_is_no_whole_answer_is_an_error(said: bytes) -> None:
    async def does(transport: Transport, upstream: Upstream, answering: Answering) -> None:
        with pytest.raises(UpstreamFailed, match="broke the connection off"):
            await whole(transport, upstream)

    run(said, does, closes=True)


def test_a_kept_connection_that_closes_as_it_is_asked_is_replaced_once() -> None:
    """Nobody can know whether it is still open. One that is new has no such excuse, nor has one of
    which a part of an answer came."""
    connections, asked = 0, 0
    parts = [SIZED, b"", SIZED, b"HTTP/1.1 2", SIZED, b"", b""]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections, asked
        connections += 1
        said = SIZED
        while said == SIZED and await reader.read(1 << 16):
            said, asked = parts[asked], asked + 1
            writer.write(said)
        writer.close()

    async def test() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        place = Place(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        upstream, transport = Upstream(place, Breaker(lambda: 0.0)), Transport(Timeouts(connect=2))
        assert [await whole(transport, upstream) for _ in range(2)] == [b"abc"] * 2
        assert (connections, asked) == (2, 3)
        with pytest.raises(UpstreamFailed, match="broke the connection off"):
            await whole(transport, upstream)
        assert (connections, asked) == (2, 4)
        assert await whole(transport, upstream) == b"abc"
        with pytest.raises(UpstreamFailed, match="broke the connection off"):
            await whole(transport, upstream)
        assert (connections, asked) == (4, 7)
        await transport.close()
        server.close()

    uvloop.run(asyncio.wait_for(test(), 10))


def test_what_follows_a_body_is_no_header() -> None:
    head = OK + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    trailers = b"0\r\ncontent-type: text/html\r\nx-more: 1\r\n\r\n"

    async def does(transport: Transport, upstream: Upstream, answering: Answering) -> None:
        answer = await transport.open(upstream, "/x", {}, b"", 1)
        assert await answer.whole() == b"abc" and answer.over
        assert answer.headers == {
            "content-type": "application/json", "transfer-encoding": "chunked",
        }  # fmt: skip
        answer.close()

    run(head + b"3\r\nabc\r\n" + trailers, does)


@pytest.mark.parametrize(
    ("location", "says"),
    [("https://other/base/v1/chat", " to https://other/base, where its URL should perhaps point"),
     ("https://a:b@other/v1/chat/", " to https://other, where its URL should perhaps point"),
     ("https://other/sign-in?to=x", " to https://other/sign-in, where its URL should perhaps point"),
     ("/v1/chat/", ""), ("", ""), ("http://[", "")],
)  # fmt: skip
def test_redirects_are_not_followed_and_say_where_to(location: str, says: str) -> None:
    async def does(transport: Transport, upstream: Upstream, answering: Answering) -> None:
        with pytest.raises(UpstreamFailed) as raised:
            await transport.open(upstream, "/v1/chat?x=1", {}, b"", 1)
        assert str(raised.value) == f"upstream {upstream.id} redirects{says}"
        assert (raised.value.status, raised.value.busy) == (502, False)

    run(
        b"HTTP/1.1 307 Temporary Redirect\r\ncontent-length: 0\r\n"
        b"location: %b\r\n\r\n" % location.encode(), does,
    )  # fmt: skip


def test_who_reads_slowly_slows_the_upstream_down_and_is_not_cut() -> None:
    """More than is held, and a pause longer than the upstream may make: all of it comes."""
    body = bytes(range(256)) * 16384  # 4 MiB

    async def does(transport: Transport, upstream: Upstream, answering: Answering) -> None:
        answer = await transport.open(upstream, "/x", {}, b"", 1, "GET")
        first = await answer.read()
        await asyncio.sleep(1.5)
        second = await answer.read()
        assert MOST_HELD < len(second) < 2 * MOST_HELD + (1 << 20)
        assert first + second + await answer.whole() == body
        answer.close()

    run(OK + b"content-length: %d\r\n\r\n" % len(body) + body, does)


def test_silence_is_cut_and_names_its_length() -> None:
    async def does(transport: Transport, upstream: Upstream, answering: Answering) -> None:
        answer = await transport.open(upstream, "/x", {}, b"", 0.1, "GET")
        assert await answer.read() == b"abc"
        with pytest.raises(UpstreamFailed, match=r"said nothing for 0\.1 s"):
            await answer.read()
        answer.close()

    run(OK + b"content-length: 9\r\n\r\nabc", does)


def test_an_answer_that_is_left_ends_its_connection() -> None:
    async def does(transport: Transport, upstream: Upstream, answering: Answering) -> None:
        answer = await transport.open(upstream, "/x", {}, b"", 1, "GET")
        answer.close()
        answer.close()
        again = await transport.open(upstream, "/x", {}, b"", 1, "GET")
        assert await again.read() == b"abc"
        again.close()
        assert answering.connections == 2

    run(OK + b"content-length: 9\r\n\r\nabc", does)


def test_a_head_is_one_request_whatever_it_names() -> None:
    async def does(transport: Transport, upstream: Upstream, answering: Answering) -> None:
        await whole(transport, upstream, "/v1/responses/a b\r\nx: y?q=1&r=%20")
        wanted = b"POST /v1/responses/a%20b%0D%0Ax:%20y?q=1&r=%20 HTTP/1.1\r\n"
        assert answering.heads[0].startswith(wanted)

    run(SIZED, does)
    for value in ("a\r\nb", "a\nb", "a\0b"):
        with pytest.raises(ValueError, match="several lines"):
            head_of("GET", "/", {"authorization": value}, 0)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_who_leaves_once_connected_is_not_asked(run: Callable[..., None]) -> None:
    """What is sent then may raise or be dropped, by the event loop."""

    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            loop, (host, port) = asyncio.get_running_loop(), listening.getsockname()
            _, connection = await loop.create_connection(UpstreamConnection, host, port)
            accepted, _ = listening.accept()
        reset_on_close = struct.pack("ii", 1, 0)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_on_close)
        accepted.close()
        while connection.usable:
            await asyncio.sleep(0.01)
        with pytest.raises(ConnectionResetError):
            connection.ask(head_of("GET", "/x", {}, 0), b"")

    run(test())


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_address_of_a_name_is_called_by_the_name(
    scheme: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its certificate is of the name, and other names at that address have others."""
    authority, secure = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(secure)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))

    async def test() -> None:
        answering = Answering(SIZED, 1 << 20, False)
        with_tls = secure if scheme == "https" else None
        server = await asyncio.start_server(answering, "127.0.0.1", 0, ssl=with_tls)
        port = server.sockets[0].getsockname()[1]
        found = of_name(f"{scheme}://localhost:{port}", None)()
        (place,) = [p for p in found if p.id == f"localhost:{port}@127.0.0.1:{port}"]
        transport = Transport(Timeouts(connect=2))
        for _ in range(2):
            assert await whole(transport, Upstream(place, Breaker(lambda: 0.0))) == b"abc"
            assert f"\r\nhost: localhost:{port}\r\n".encode() in answering.heads[-1]
        assert answering.connections == 1
        other = Upstream(replace(place, name="other:443"), Breaker(lambda: 0.0))
        if scheme == "https":
            with pytest.raises(UpstreamFailed, match="has no certificate that is trusted"):
                await whole(transport, other)
        await transport.close()
        server.close()

    asyncio.run(test())


def test_who_takes_no_connection_is_down() -> None:
    async def test() -> None:
        transport = Transport(Timeouts(connect=2))
        for url, code, says in (
            ("http://127.0.0.1:1", "upstream_down", "takes no connection"),
            ("http://nobody.invalid:1", "upstream_failed", "a name that nobody knows"),
        ):
            upstream = Upstream(Place(url), Breaker(lambda: 0.0))
            with pytest.raises(UpstreamFailed, match=says) as raised:
                await transport.open(upstream, "/x", {}, b"", 1)
            assert raised.value.code == code

    asyncio.run(test())
