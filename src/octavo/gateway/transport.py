"""HTTP to upstreams: kept connections, limits of time, and answers that can be cut."""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from time import monotonic
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from octavo.gateway.connection import Sink, UpstreamConnection, head_of
from octavo.gateway.errors import Exhausted, UpstreamFailed
from octavo.gateway.loops import signed
from octavo.gateway.upstream import Upstream

KEEP_ALIVE = 4.0  # seconds: uvicorn closes idle connections after 5
MOST_WHOLE = 256 << 20  # bytes of an answer that is not streamed
MOST_SAID = 200  # characters of where an upstream redirects to
OWN = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}  # what the gateway itself lacks
FAULTS = (OSError, TimeoutError, ValueError)  # no host, no certificate, no answer; no header
SAFE = "/?&=%:+,;@!$'()*~-._[]"  # of a path and a query, as they are


@dataclass(frozen=True)
class Timeouts:
    """Seconds: to connect, to the first byte of an answer, between its parts, and for all of it.
    foreign: between the parts of an answer that cannot go on elsewhere."""

    connect: float = 2.0
    first: float = 120.0
    idle: float = 10.0
    total: float = 3600.0

    @property
    def foreign(self) -> float:
        return 3 * self.idle


class Answer:
    """The answer of an upstream, which is read to its end or closed. leave: is given the connection
    then."""

    def __init__(
        self, connection: UpstreamConnection, who: str, idle: float,
        leave: Callable[[UpstreamConnection], None],
    ) -> None:  # fmt: skip
        self.status, self.headers = connection.status, connection.headers
        self.media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        self.connection, self._leave = connection, leave
        self._who, self._idle = who, idle
        self._why: UpstreamFailed | None = None
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(idle, self._look)

    def _look(self) -> None:
        """Cuts an answer that has paused too long."""
        connection, now = self.connection, monotonic()
        due = now + self._idle if connection.held else connection.heard + self._idle
        if due <= now:
            self.cut(f"said nothing for {self._idle:g} s", "upstream_timeout")
        else:
            self._timer = self._loop.call_later(due - now, self._look)

    def limit_pauses(self, idle: float) -> None:
        """It may pause so long from now on."""
        self._idle = idle
        self._timer.cancel()
        self._timer = self._loop.call_later(idle, self._look)

    def cut(self, why: str, code: str = "upstream_failed") -> None:
        """Whoever reads gets an error. Called from outside."""
        self._why = self._why or UpstreamFailed(f"upstream {self._who} {why}", code)
        if not self._closed:
            self.connection.close()

    async def read(self, sink: Sink | None = None) -> bytes:
        """What has come, b"" at the end. sink: may take it before. Raises UpstreamFailed, and what
        `sink` raises."""
        connection = self.connection
        while not connection.held:
            if self._why is not None:
                raise self._why
            if connection.ended or self._closed:
                return b""
            if connection.error is not None:
                raise failed(self._who, connection.error)
            await connection.come(sink)
        return connection.take()

    async def whole(self) -> bytes:
        """All of it. Raises UpstreamFailed."""
        data = bytearray()
        while part := await self.read():
            data += part
            if len(data) > MOST_WHOLE:
                raise UpstreamFailed(f"upstream {self._who} sent over {MOST_WHOLE} bytes")
        return bytes(data)

    @property
    def over(self) -> bool:
        """All of it has come, and was read."""
        return self.connection.ended and not self.connection.held

    def check(self) -> None:
        """Raises UpstreamFailed for an answer that was cut."""
        if self._why is not None:
            raise self._why

    def close(self) -> None:
        """An answer that has not ended is broken off, which tells the upstream to stop."""
        if not self._closed:
            self._closed = True
            self._timer.cancel()
            self.connection.forget()
            self._leave(self.connection)


class KeptConnections:
    """Connections that are not in use, by where they go."""

    def __init__(self) -> None:
        self._idle: dict[str, list[tuple[UpstreamConnection, asyncio.TimerHandle]]] = {}

    def take(self, place: str) -> UpstreamConnection | None:
        """The one that was used last, if there is one that can be used again."""
        while place in self._idle:
            connection, timer = self._pop(place, -1)
            timer.cancel()
            if connection.usable:
                return connection
        return None

    def give_back(self, place: str, connection: UpstreamConnection) -> None:
        """Keeps a connection for a while, or closes one that cannot be used again."""
        if not (connection.ended and connection.usable):
            return connection.close()
        timer = asyncio.get_running_loop().call_later(KEEP_ALIVE, self._expire, place)
        self._idle.setdefault(place, []).append((connection, timer))

    def _expire(self, place: str) -> None:
        self._pop(place, 0)[0].close()  # that which has waited the longest

    def _pop(self, place: str, at: int) -> tuple[UpstreamConnection, asyncio.TimerHandle]:
        idle = self._idle[place]
        found = idle.pop(at)
        if not idle:
            del self._idle[place]
        return found

    def close(self) -> None:
        for place in list(self._idle):
            while (connection := self.take(place)) is not None:
                connection.close()


@cache
def _split(url: str) -> SplitResult:
    return urlsplit(url)


class Transport:
    """Connections to all upstreams. name: that the gateway has in what it passes on."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.name = f"octavo-{secrets.token_hex(8)}"
        self.configure(timeouts)
        self._kept = KeptConnections()
        self._secure = ssl.create_default_context()

    def configure(self, timeouts: Timeouts) -> None:
        """Requests that are sent from now on keep to these."""
        self.timeouts = timeouts

    async def open(
        self, upstream: Upstream, path: str, headers: Mapping[str, str], body: bytes, idle: float,
        method: str = "POST",
    ) -> Answer:  # fmt: skip
        """Sends a request; its answer, once its headers have come. Raises UpstreamFailed."""
        url, headers = _split(upstream.place.url), signed(headers, self.name)
        host = upstream.place.name or url.netloc
        place = f"{url.scheme}://{url.netloc} {host}"  # another name has another certificate
        connection: UpstreamConnection | None = None
        try:
            target = quote(f"{url.path}{path}", SAFE)
            head = head_of(method, target, {"host": host, **headers}, len(body))
            connection = self._kept.take(place)
            if connection is None or not await connection.asked(head, body):
                connection = None  # one that was kept may have been closed as it was asked
                connection = await self._connect(url, host)
                if not await connection.asked(head, body):
                    raise connection.error or ConnectionResetError()
        except BaseException as e:
            if connection is not None:
                connection.close()
            if isinstance(e, FAULTS):
                raise failed(upstream.id, e, connection is None) from None
            raise
        if 300 <= connection.status < 400:
            connection.close()
            raise redirected(upstream, path, connection.headers.get("location", ""))
        return Answer(connection, upstream.id, idle, partial(self._kept.give_back, place))

    async def _connect(self, url: SplitResult, host: str) -> UpstreamConnection:
        """A new one. host: whose certificate it has to have."""
        secure = self._secure if url.scheme == "https" else None
        port = url.port or (80 if secure is None else 443)
        name = None if secure is None else _split(f"//{host}").hostname
        async with asyncio.timeout(self.timeouts.connect):
            _, connection = await asyncio.get_running_loop().create_connection(
                UpstreamConnection, url.hostname or "", port, ssl=secure, server_hostname=name
            )
        return connection

    async def get(self, upstream: Upstream, path: str, seconds: float) -> tuple[int, bytes]:
        """Status and body. Raises UpstreamFailed."""
        key = upstream.place.key
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        try:
            async with asyncio.timeout(seconds):
                answer = await self.open(upstream, path, headers, b"", seconds, "GET")
                try:
                    return answer.status, await answer.whole()
                finally:
                    answer.close()
        except TimeoutError as e:
            raise failed(upstream.id, e) from None

    async def close(self) -> None:
        self._kept.close()


def failed(who: str, error: BaseException, connecting: bool = False) -> UpstreamFailed:
    """What went wrong with an upstream, in words that say nothing of the request."""
    if isinstance(error, ssl.SSLError):
        return UpstreamFailed(f"upstream {who} has no certificate that is trusted")
    if connecting and isinstance(error, OSError) and (lack := _lack(error)):
        return Exhausted(lack)
    if isinstance(error, socket.gaierror):
        return UpstreamFailed(f"upstream {who} has a name that nobody knows")
    if isinstance(error, TimeoutError):
        return UpstreamFailed(f"upstream {who} did not answer in time", "upstream_timeout", True)
    if connecting and isinstance(error, OSError):
        return UpstreamFailed(f"upstream {who} takes no connection", "upstream_down")
    return UpstreamFailed(f"upstream {who} broke the connection off")


def redirected(upstream: Upstream, path: str, location: str) -> UpstreamFailed:
    """An upstream answers that something is elsewhere: maybe all of it is."""
    text = f"upstream {upstream.id} redirects"
    with suppress(ValueError):
        to = urlsplit(urljoin(upstream.place.url + path, location))
        base = to.path.rstrip("/").removesuffix(path.partition("?")[0])
        there = f"{to.scheme}://{to.netloc.rpartition('@')[2]}{base}"
        if location and there != upstream.place.url:
            text += f" to {there[:MOST_SAID]}, where its URL should perhaps point"
    return UpstreamFailed(text)


def _lack(error: OSError) -> str:
    """What the gateway itself lacks so that nobody can be connected to, "" for nothing. Looking up
    a name without handles fails in other words, so a socket is tried."""
    if error.errno in OWN:
        return error.strerror or "no memory"
    try:
        socket.socket().close()
    except OSError as e:
        return e.strerror or "no sockets"
    return ""
