"""Finds upstreams while serving: of a file, of a name, and how services of Kubernetes are named."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from octavo.errors import UsageError
from octavo.gateway.upstream import DEFAULT, Place, parse_place

LOG = logging.getLogger("octavo.gateway")
LOOK = 1.0  # seconds between looks at a file
ASK = 5.0  # seconds between questions for a name
KUBERNETES = "k8s://"
Find = Callable[[], list[Place]]
Take = Callable[[list[Place]], None]


@dataclass(frozen=True)
class Service:
    """A service of Kubernetes. port: its name there, or the number that the pods listen on."""

    namespace: str
    name: str
    port: str


def parse_service(url: str) -> Service:
    """What `k8s://NAMESPACE/SERVICE:PORT` names. Raises UsageError."""
    found = re.fullmatch(r"k8s://([a-z0-9-]+)/([a-z0-9-]+):([a-z0-9-]+)", url.rstrip("/"))
    if found is None:
        raise UsageError(
            f"{url!r} is not k8s://NAMESPACE/SERVICE:PORT", "--upstream k8s://llm/engines:8000"
        )
    return Service(*found.groups())


class UpstreamSource(Protocol):
    """Says which upstreams there are."""

    async def look(self) -> list[Place]:
        """Those that there are now. Raises UsageError."""
        ...

    async def follow(self, take: Take) -> None:
        """Tells of all of them whenever others are there than before, until it is cancelled."""
        ...


def of_file(file: Path, key: str | None, pool: str = DEFAULT) -> Find:
    """Reads a file with an upstream a line, `#` before comments."""

    def find() -> list[Place]:
        try:
            lines = file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
            raise UsageError(f"--upstream-file {str(file)!r} cannot be read: {why}") from None
        texts = (line.partition("#")[0].strip() for line in lines)
        try:
            return [parse_place(text, pool, key) for text in texts if text]
        except UsageError as e:
            raise UsageError(str(e).replace("--upstream", f"{str(file)!r}:")) from None

    return find


def of_name(text: str, key: str | None, pool: str = DEFAULT) -> Find:
    """Asks for the addresses of a URL's name: each is an upstream."""
    place = parse_place(text, pool, key)
    parts = urlsplit(place.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)

    def find() -> list[Place]:
        try:
            found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise UsageError(f"--upstream-dns {text!r}: nobody knows this name") from None
        places = []
        for at in sorted({str(address[0]) for *_, address in found}):
            url = f"{parts.scheme}://{f'[{at}]' if ':' in at else at}:{port}{parts.path}"
            name = "" if at == parts.hostname else parts.netloc
            places.append(Place(url, place.pool, key, name))
        return places

    return find


class Polled:
    """A source that is looked at again and again. Where that fails, all stays as it is."""

    def __init__(self, find: Find, seconds: float) -> None:
        self._find, self._seconds = find, seconds

    async def look(self) -> list[Place]:
        return await asyncio.to_thread(self._find)

    async def follow(self, take: Take) -> None:
        said = ""
        while True:
            await asyncio.sleep(self._seconds)
            try:
                take(await self.look())
                said = ""
            except UsageError as e:
                if str(e) != said:
                    LOG.warning("%s; the upstreams stay as they are", e)
                said = str(e)
