"""Fetches files by http(s) from hosts that the operator allows, and from nowhere else.

A host's addresses are checked before one of them is connected to, and that very address is
connected to: a name cannot come to mean this machine or its neighbours in between.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

from octavo.errors import InvalidValue, RequestError
from octavo.generate.lookup import Lookups

SECONDS = 5.0  # for everything
MAX_BYTES = 20 << 20
CHUNK = 1 << 16
_URL = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?(/[!-~]*)?", re.ASCII | re.IGNORECASE)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_TARGET = re.compile(r"[^\\#]*")


def is_public(address: str) -> bool:
    """Whether an address belongs to the internet, not to this machine, its networks or a tunnel
    into them."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        tunnel = ip.ipv4_mapped or ip.sixtofour or ip.teredo or ip in _NAT64
        return ip.is_global and not ip.is_multicast and not tunnel
    return ip.is_global and not ip.is_multicast


class _Pinned(HTTPConnection):
    """A connection over a socket that is open already."""

    def __init__(self, host: str, port: int, sock: socket.socket) -> None:
        super().__init__(host, port)
        self.sock = sock

    def connect(self) -> None:
        raise OSError("the connection was closed")


class Fetcher:
    """Fetches files from hosts of `domains`. allowed: which addresses may be connected to; seconds:
    for a file, from the look-up of its host to its last byte."""

    def __init__(
        self, domains: Sequence[str] = (), *, lookups: Lookups | None = None,
        allowed: Callable[[str], bool] = is_public, seconds: float = SECONDS,
    ) -> None:  # fmt: skip
        self._domains, self._lookups = domains, lookups or Lookups()
        self._allowed, self._seconds = allowed, seconds

    def fetch(self, url: str, at: str) -> bytes:
        """The file behind a URL. No redirect is followed. Raises RequestError naming `at`."""
        host, port, secure, target = _parts(url, self._domains, at)
        deadline = time.monotonic() + self._seconds
        try:
            addresses = self._lookups.find(host, self._seconds)
            if not addresses or not all(map(self._allowed, addresses)):
                raise InvalidValue(f"{at}: {host} is no public host", at)
            with _connected(addresses[0], port, deadline) as plain:
                sock = _secured(plain, host) if secure else plain
                with closing(_Pinned(host, port, sock)) as connection:
                    data = _get(connection, target, at)
                if time.monotonic() >= deadline:  # a body of no declared length ends when it is cut
                    raise TimeoutError
                return data
        except (OSError, HTTPException, ValueError) as e:
            late = isinstance(e, TimeoutError) or time.monotonic() >= deadline
            why = f"took over {self._seconds:g} seconds" if late else "could not be fetched"
            raise InvalidValue(f"{at}: the image {why}", at) from e


@contextmanager
def _connected(address: str, port: int, deadline: float) -> Iterator[socket.socket]:
    """A connection that is cut at the deadline. Raises OSError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    with socket.create_connection((address, port), timeout=left) as sock:
        # One byte at a time would outlast any timeout of single reads.
        timer = threading.Timer(deadline - time.monotonic(), _cut, [sock])
        timer.daemon = True
        timer.start()
        try:
            yield sock
        finally:
            timer.cancel()


def _parts(url: str, domains: Sequence[str], at: str) -> tuple[str, int, bool, str]:
    """Host, port, whether TLS is wanted, and path of a URL. Raises RequestError."""
    if not domains:
        raise RequestError(
            f"{at}: images by URL are off here; send it as data:image/png;base64,... or have "
            "the server started with --media-domain HOST", at, "unsupported_parameter",
        )  # fmt: skip
    whole = _URL.fullmatch(url) if len(url) <= 4096 else None
    if whole is None or not _TARGET.fullmatch(whole[2] or "/"):
        raise InvalidValue(f"{at} is no plain http(s) URL", at)
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    if host not in map(str.lower, domains):
        raise InvalidValue(f"{at}: images may come from {', '.join(domains)} only", at)
    secure = parts.scheme == "https"
    try:
        port = parts.port or (443 if secure else 80)
    except ValueError:
        raise InvalidValue(f"{at} is no plain http(s) URL", at) from None
    return host, port, secure, whole[2] or "/"


def _secured(sock: socket.socket, host: str) -> socket.socket:
    """TLS over a copy of the socket: it takes what it is given away from who would cut it."""
    return ssl.create_default_context().wrap_socket(sock.dup(), server_hostname=host)


def _cut(sock: socket.socket) -> None:
    """Ends a connection that takes too long, in whatever it waits for."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _get(connection: HTTPConnection, target: str, at: str) -> bytes:
    """The body of a plain 200. Raises RequestError, OSError, HTTPException."""
    connection.request("GET", target, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
    with connection.getresponse() as response:  # else its socket stays open until collected
        if response.status != 200:
            raise InvalidValue(f"{at}: its host answered {response.status}", at)
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise InvalidValue(f"{at}: its host sent it compressed", at)
        data = bytearray()
        while chunk := response.read(CHUNK):
            data += chunk
            if len(data) > MAX_BYTES:
                raise InvalidValue(f"{at} has over {MAX_BYTES:,} bytes", at)
        if response.length:
            raise OSError("the connection ended early")
        return bytes(data)
