"""HTTP to upstreams: kept connections, limits of time, and answers that can be cut."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from octavo.gateway.errors import UpstreamFailed
from octavo.gateway.upstream import Upstream

KEEP_ALIVE = 4.0  # seconds: uvicorn closes idle connections after 5
LARGE = 1 << 19  # bytes of a body that is written in parts
MOST_WHOLE = 256 << 20  # bytes of an answer that is not streamed
QUIET = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")  # which clients send themselves
FAULTS = (aiohttp.ClientError, OSError, TimeoutError)


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
    """The answer of an upstream, which is read to its end or closed."""

    def __init__(self, response: aiohttp.ClientResponse, who: str, idle: float) -> None:
        self._response, self._content = response, response.content
        self._who, self._idle = who, idle
        self._why: UpstreamFailed | None = None
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer = self._loop.call_later(idle, self._look)

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers

    @property
    def media_type(self) -> str:
        return self._response.headers.get("content-type", "").partition(";")[0].strip().lower()

    def _look(self) -> None:
        """Cuts an answer that has paused too long."""
        if (due := self._last + self._idle) <= self._loop.time():
            self.cut(f"said nothing for {self._idle:g} s", "upstream_timeout")
        else:
            self._timer = self._loop.call_at(due, self._look)

    def cut(self, why: str, code: str = "upstream_failed") -> None:
        """Whoever reads gets an error. Called from outside."""
        self._why = self._why or UpstreamFailed(f"upstream {self._who} {why}", code)
        self._response.close()

    async def read(self) -> bytes:
        """What has come, b"" at the end. Raises UpstreamFailed."""
        try:
            data = await self._content.readany()
        except FAULTS as e:
            raise self._why or failed(self._who, e) from None
        if self._why is not None and not data:
            raise self._why
        self._last = self._loop.time()
        return data

    async def whole(self) -> bytes:
        """All of it. Raises UpstreamFailed."""
        data = bytearray()
        while part := await self.read():
            data += part
            if len(data) > MOST_WHOLE:
                raise UpstreamFailed(f"upstream {self._who} sent over {MOST_WHOLE} bytes")
        return bytes(data)

    def check(self) -> None:
        """Raises UpstreamFailed for an answer that was cut."""
        if self._why is not None:
            raise self._why

    def close(self) -> None:
        """An answer that has not ended is broken off, which tells the upstream to stop."""
        self._timer.cancel()
        if not self._content.is_eof():
            self._response.close()
        self._response.release()


class Transport:
    """Connections to all upstreams."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.configure(timeouts)
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=KEEP_ALIVE, ttl_dns_cache=5, enable_cleanup_closed=True
        )
        self._session = aiohttp.ClientSession(
            connector=connector, auto_decompress=False, skip_auto_headers=QUIET,
            cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=1 << 18,
        )  # fmt: skip

    def configure(self, timeouts: Timeouts) -> None:
        """Requests that are sent from now on keep to these."""
        self.timeouts = timeouts
        self._limits = aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect)

    async def open(
        self, upstream: Upstream, path: str, headers: Mapping[str, str], body: bytes, idle: float,
        method: str = "POST",
    ) -> Answer:  # fmt: skip
        """Sends a request; its answer, once its headers have come. Raises UpstreamFailed."""
        data = io.BytesIO(body) if len(body) > LARGE else body
        try:
            response = await self._session.request(
                method, upstream.place.url + path, data=data or None, headers=headers,
                allow_redirects=False, timeout=self._limits,
            )  # fmt: skip
        except FAULTS as e:
            raise failed(upstream.id, e) from None
        return Answer(response, upstream.id, idle)

    async def get(self, upstream: Upstream, path: str, seconds: float) -> tuple[int, bytes]:
        """Status and body. Raises UpstreamFailed."""
        key = upstream.place.key
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.get(
                    upstream.place.url + path, headers=headers, timeout=self._limits
                ) as response,
            ):
                return response.status, await response.read()
        except FAULTS as e:
            raise failed(upstream.id, e) from None

    async def close(self) -> None:
        await self._session.close()


def failed(who: str, error: BaseException) -> UpstreamFailed:
    """What went wrong with an upstream, in words that say nothing of the request."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
        return UpstreamFailed(f"upstream {who} has no certificate that is trusted")
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return UpstreamFailed(f"upstream {who} has a name that nobody knows")
    if isinstance(error, aiohttp.ClientConnectorError):
        return UpstreamFailed(f"upstream {who} takes no connection", "upstream_down")
    if isinstance(error, TimeoutError):
        return UpstreamFailed(f"upstream {who} did not answer in time", "upstream_timeout", True)
    return UpstreamFailed(f"upstream {who} broke the connection off")
