"""The page: the files of `ui/`, which browsers get at `/` and `/ui/`."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from octavo.server.guard import PAGE

FOLDER = Path(__file__).with_name("ui")
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    "": "text/plain; charset=utf-8",  # licences
}
# Nothing inline, nothing from elsewhere: what a model writes cannot become a script.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
HEADERS = {
    "cache-control": "no-cache",  # kept, and asked for again by its etag
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-dns-prefetch-control": "off",  # of links in replies
}


@dataclass(frozen=True)
class File:
    """plain, packed: its bytes, and the same in gzip."""

    plain: bytes
    packed: bytes
    media: str
    etag: str


@cache
def names() -> frozenset[str]:
    """The files that there are; no other name reaches the disk."""
    files = (path for path in FOLDER.rglob("*") if path.is_file())
    return frozenset(path.relative_to(FOLDER).as_posix() for path in files)


@cache
def read(name: str) -> File:
    """A file, read when it is asked for first. Raises HTTPException if there is none."""
    if name not in names():
        raise HTTPException(404)
    path = FOLDER / name
    plain = path.read_bytes()
    etag = f'W/"{hashlib.sha256(plain).hexdigest()[:20]}"'
    return File(plain, gzip.compress(plain, mtime=0), TYPES[path.suffix], etag)


async def send(request: Request) -> Response:
    """The file that the path names, the page itself at the root."""
    one = await asyncio.to_thread(read, request.path_params.get("name", INDEX))
    headers = HEADERS | {"etag": one.etag, "vary": "accept, accept-encoding"}
    if one.etag in request.headers.get("if-none-match", ""):
        return Response(None, 304, headers)
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(one.plain, 200, headers, one.media)
    return Response(one.packed, 200, headers | {"content-encoding": "gzip"}, one.media)


class _Browsers(Route):
    """Matches who asks for HTML. Others get what a dialect says at the same path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http" and "text/html" in Headers(scope=scope).get("accept", ""):
            return super().matches(scope)
        return Match.NONE, {}


ROUTES: tuple[BaseRoute, ...] = (
    _Browsers("/", send, methods=["GET"]),
    Route(f"{PAGE}{{name:path}}", send, methods=["GET"]),
)
