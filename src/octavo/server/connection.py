"""An HTTP connection with limits of bytes, of time and of the number of connections.

uvicorn limits neither headers nor the time a client takes, treats half-closed connections as
closed, and answers malformed HTTP in plain text.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.errors import RequestError
from octavo.server.dialect import ErrorBody
from octavo.server.direct import DirectWriter
from octavo.server.exchange import Exchange, Observer
from octavo.server.presence import Presence
from octavo.server.wire import Wire

LINGER = 2.0  # seconds for a client to read a refusal while it still sends
OVERFLOW = 32  # connections above the limit, which are only sent an error
RESERVED = 64  # file handles that are no connections
MOST_HANDLES = 65536
PROBES = (0.05, 0.2, 1, 5, 20, 60, 120)  # seconds between them


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one client. Sizes in bytes, times in seconds."""

    connections: int
    head: int = 64 << 10  # request line and headers
    headers: int = 128
    url: int = 8 << 10
    pipelined: int = 16  # requests sent before earlier ones are answered
    discarded: int = 32 << 20  # of a body after its request has been answered
    head_seconds: float = 10
    body_idle_seconds: float = 30
    body_seconds: float = 120
    write_seconds: float = 60  # for the client to read what is sent


def connection_limit() -> int:
    """Raises the limit of file handles, and returns how many connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_HANDLES if hard == resource.RLIM_INFINITY else min(hard, MOST_HANDLES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(wanted - RESERVED - OVERFLOW, 16)


class Refusal(RequestError):
    """An error found before the application gets the request."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message, None, code)
        self.status = status


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with limits. `check` must be called about once a second.

    error_body: how errors are written that come before there is a route.
    """

    transport: Any
    cycle: Any

    def __init__(
        self, *, limits: ConnectionLimits, observe: Observer, error_body: ErrorBody, **uvicorn: Any
    ) -> None:
        super().__init__(**uvicorn)
        self._error_body = error_body
        self._limits = limits
        self._observe = observe
        self._open: list[Presence] = []  # of requests whose response is not complete
        self._deaf = False  # further input is discarded
        self._ended = False  # the client has closed its sending side
        self._parsed = 0  # callbacks of the parser so far
        self._stuck = 0  # bytes since the last one
        self._head = self._count = 0  # bytes and number of headers
        self._discarded = 0
        now = time.monotonic()
        self._used = now
        self._head_since: float | None = now
        self._body_since: float | None = None
        self._blocked_since: float | None = None
        self._closing_since: float | None = None

    # -- beginning and end --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self.transport = Wire(cast(asyncio.Transport, transport))
        # The kernel buffers megabytes for a client that reads nothing; this limits for how long.
        wait = int(1000 * self._limits.write_seconds)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, wait)
        excess = len(self.connections) - self._limits.connections
        others = cast("Iterable[Connection]", self.connections)
        if excess <= 0 or excess <= sum(c.leaving for c in others) or _evict(others, self):
            return
        if excess > OVERFLOW:
            self.transport.abort()
        else:
            self._refuse(Refusal(503, "the server has too many connections", "overloaded"))

    def connection_lost(self, exc: Exception | None) -> None:
        for one in self._open:
            one.leave()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns True to keep the connection open for writing: the client may still read."""
        self._ended = True
        if self._deaf or not self.working:
            return False
        self._probe(0)
        return True

    def _probe(self, sent: int) -> None:
        """Sends the first bytes of the response, which fails if the client is gone."""
        if not self._open or self._open[0].cycle.response_started or self.transport.is_closing():
            return
        self.transport.begin_answer()
        if sent < len(PROBES):
            self.loop.call_later(PROBES[sent], self._probe, sent + 1)

    @property
    def working(self) -> bool:
        """True while a completely received request waits for its response."""
        return any(not one.cycle.more_body for one in self._open)

    @property
    def leaving(self) -> bool:
        """True once no request of this connection is answered any more."""
        return self.transport.is_closing() or (self._deaf and not self.working)

    def give_way(self) -> float | None:
        """When the connection was last used, None if it must not be closed."""
        return None if self.working or self.leaving else self._used

    # -- reading ------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._discard(len(data))
            return
        self._unset_keepalive_if_required()
        before = self._parsed
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as e:
            rest = data[e.args[0] :]
            if self.ws_protocol_class is not None and (b"upgrade", b"websocket") in self.headers:
                self._become_socket(rest)
            else:
                self._without_upgrade(rest)
        except httptools.HttpParserError as e:
            known = e.__context__
            if not isinstance(known, Refusal):
                known = Refusal(400, "this is not a valid HTTP request", "invalid_http")
            self._refuse(known)
            return
        self._stuck = 0 if self._parsed != before else self._stuck + len(data)
        if self._stuck > self._limits.head:
            self._refuse(self._too_long())

    def _become_socket(self, rest: bytes) -> None:
        """Hands the connection over to the protocol of WebSockets."""
        if self._open:
            return self._refuse(Refusal(400, "an upgrade waits for earlier answers", "pipelined"))
        head = [b"GET ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            head += [name, b": ", value, b"\r\n"]
        self.connections.discard(self)
        made: Any = self.ws_protocol_class
        protocol = made(
            config=self.config, server_state=self.server_state, app_state=self.app_state
        )
        protocol.connection_made(self.transport)
        self.transport.set_protocol(protocol)
        protocol.data_received(b"".join([*head, b"\r\n", rest]))

    def _without_upgrade(self, rest: bytes) -> None:
        """Parses a request again without its Upgrade header, which a server may ignore.

        The parser does not read the body of a request with one, and Java's client sends it with
        every first request.
        """
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name not in (b"connection", b"upgrade"):
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join([*head, b"\r\n", rest]))

    def _too_long(self) -> Refusal:
        return Refusal(
            431, f"the headers take more than {self._limits.head:,} bytes", "headers_too_large"
        )

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= self._limits.pipelined:
            raise Refusal(400, "too many requests were sent ahead of their answers", "pipelined")
        super().on_message_begin()
        self._parsed += 1
        self._head = self._count = self._discarded = 0
        self._head_since = time.monotonic()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._parsed += 1
        if len(self.url) > self._limits.url:
            raise Refusal(
                414, f"the address is longer than {self._limits.url:,} bytes", "url_too_long"
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        self._parsed += 1
        self._head += len(name) + len(value)
        if self._head > self._limits.head:
            raise self._too_long()
        self._count += 1
        if self._count > self._limits.headers:
            raise Refusal(
                431, f"there are more than {self._limits.headers} headers", "headers_too_large"
            )
        if self._body_since is None:  # trailers are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._parsed += 1
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise Refusal(400, "this server is no proxy", "invalid_http")
            return
        self._head_since = None
        self._used = self._body_since = time.monotonic()
        try:
            super().on_headers_complete()
        except (httptools.HttpParserInvalidURLError, UnicodeError, AttributeError):
            raise Refusal(400, "the address cannot be read", "invalid_http") from None
        presence, scope = Presence(self.cycle), cast(Scope, self.scope)
        self._open = [*self._unanswered(), presence]
        scope["presence"] = presence
        scope["direct"] = DirectWriter(self.cycle, self.transport.inner.write)

    def on_body(self, body: bytes) -> None:
        self._parsed += 1
        self._used = time.monotonic()
        if self.cycle.response_complete:
            self._discard(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._parsed += 1
        if self.parser.should_upgrade():
            return  # it is read again
        self._body_since = None
        super().on_message_complete()

    def _discard(self, count: int) -> None:
        self._discarded += count
        if self._discarded > self._limits.discarded:
            self.transport.abort()

    # -- writing ------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        self.transport.flush()  # a head that no body follows
        self._open = self._unanswered()
        self._used = time.monotonic()
        super().on_response_complete()
        if self._ended and not self._open:
            self.transport.close()
        elif self._ended:
            self._probe(len(PROBES))

    def _unanswered(self) -> list[Presence]:
        return [one for one in self._open if not one.cycle.response_complete]

    def pause_writing(self) -> None:
        self._blocked_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._blocked_since = None
        super().resume_writing()

    def _refuse(self, refusal: Refusal) -> None:
        """Stops reading and sends the error, unless a response is being sent: it is completed."""
        self._deaf = True
        self._unset_keepalive_if_required()
        last = self._open[-1] if self._open else None
        if last is not None and not last.cycle.more_body:
            last.cycle.keep_alive = False
            return
        answered = last is None and self._body_since is not None
        if answered or len(self._open) > 1 or (last is not None and last.cycle.response_started):
            self.transport.abort()
            return
        if last is not None:
            last.leave()
        body = self._error_body(refusal)
        head = (
            f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.write_eof()
        self._closing_since = time.monotonic()
        done = Exchange(status=refusal.status, code=refusal.code, sent=len(body), began=self._used)
        done.ended = time.monotonic()
        self._observe(done)

    # -- time ---------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """Ends the connection if a time limit has passed."""
        limits = self._limits
        if self.transport.is_closing() and self._closing_since is None:
            self._closing_since = now
        if self._closing_since is not None:
            if now - self._closing_since > (LINGER if self._deaf else limits.write_seconds):
                self.transport.abort()
        elif self._blocked_since is not None:
            if now - self._blocked_since > limits.write_seconds:
                self.transport.abort()
        elif self.flow.read_paused:
            return  # the server itself does not read
        elif self._head_since is not None:
            if now - self._head_since <= limits.head_seconds:
                return
            if not self._parsed + self._stuck:
                self.transport.close()  # no request was begun
            else:
                self._refuse(Refusal(408, "the headers did not come in time", "request_timeout"))
        elif self._body_since is not None and (
            now - self._used > limits.body_idle_seconds
            or now - self._body_since > limits.body_seconds
        ):
            self._refuse(Refusal(408, "the body did not come in time", "request_timeout"))


def _evict(connections: Iterable[Connection], newest: Connection) -> bool:
    """Closes the connection that has been idle longest. Returns False if all are busy."""
    ages = [
        (since, id(c), c)
        for c in connections
        if c is not newest and (since := c.give_way()) is not None
    ]
    if not ages:
        return False
    min(ages)[2].transport.abort()
    return True


async def watch(connections: Iterable[Any]) -> None:
    """Checks all connections once a second until it is cancelled."""
    while True:
        await asyncio.sleep(1)
        _check_all(connections)


def _check_all(connections: Iterable[Any]) -> None:
    now = time.monotonic()
    for connection in list(connections):
        connection.check(now)
