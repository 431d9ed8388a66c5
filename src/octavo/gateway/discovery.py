"""Finds upstreams while serving: those of a file, and those that a name stands for."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from octavo.errors import UsageError
from octavo.gateway.health import Health
from octavo.gateway.upstream import Place, Upstream, parse_place

LOG = logging.getLogger("octavo.gateway")
LOOK = 1.0  # seconds between looks at a file
ASK = 5.0  # seconds between questions for a name
Find = Callable[[], list[Place]]


def of_file(file: Path, key: str | None) -> Find:
    """Reads a file with an upstream a line, `#` before comments."""

    def find() -> list[Place]:
        try:
            lines = file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
            raise UsageError(f"--upstream-file {str(file)!r} cannot be read: {why}") from None
        texts = (line.partition("#")[0].strip() for line in lines)
        return [parse_place(text, key=key) for text in texts if text]

    return find


def of_name(text: str, key: str | None) -> Find:
    """Asks for the addresses of a URL's name: each is an upstream."""
    place = parse_place(text, key=key)
    parts = urlsplit(place.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)

    def find() -> list[Place]:
        try:
            found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise UsageError(f"--upstream-dns {text!r}: nobody knows this name") from None
        hosts = sorted({f"[{a[0]}]" if ":" in str(a[0]) else str(a[0]) for *_, a in found})
        urls = [f"{parts.scheme}://{host}:{port}{parts.path}" for host in hosts]
        return [Place(url, place.pool, key) for url in urls]

    return find


class Follow:
    """Keeps the upstreams as one source says: those that it names no longer are drained."""

    def __init__(self, health: Health, find: Find, seconds: float) -> None:
        self._health, self._find, self._seconds = health, find, seconds
        self._mine: dict[str, Upstream] = {}
        self._error = ""

    def take(self, places: list[Place]) -> None:
        """Takes over what the source says now."""
        named = {place.id: place for place in places}
        for name in self._mine.keys() - named.keys():
            self._health.retire(self._mine.pop(name))
        for name, place in named.items():
            if name not in self._mine or self._mine[name].place != place:
                self._mine[name] = self._health.add(place)

    async def run(self) -> None:
        """Looks again and again. Where that fails, all stays as it is."""
        while True:
            await asyncio.sleep(self._seconds)
            try:
                self.take(await asyncio.to_thread(self._find))
                self._error = ""
            except UsageError as e:
                if str(e) != self._error:
                    LOG.warning("%s; the upstreams stay as they are", e)
                self._error = str(e)
