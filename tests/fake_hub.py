"""A model hub on the loopback: the few answers of its API that a download needs, and ways to fail."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """Serves `repos`: folders by repository id. Files in `stalled` come half, then nothing more;
    those in `broken` come half, then the connection ends."""

    daemon_threads = True

    def __init__(self, repos: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos = repos
        self.stalled: set[str] = set()
        self.broken: set[str] = set()
        self.half_sent = threading.Event()
        self.closing = threading.Event()
        self.sent: Counter[str] = Counter()  # whole files, by name
        self.asked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _answer(self, body: bool) -> None:
        self.server.asked += 1
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4:], body)
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), "/".join(parts[4:]), body)
        else:
            self._json(404, {"error": "not found"}, body)

    def _api(self, repo: str, rest: list[str], body: bool) -> None:
        if repo not in self.server.repos:
            self._json(
                404, {"error": "Repository not found"}, body, {"X-Error-Code": "RepoNotFound"}
            )
            return
        folder = self.server.repos[repo]
        files = sorted(f for f in folder.rglob("*") if f.is_file())
        if rest[:1] == ["tree"]:
            self._json(200, [
                {"type": "file", "path": str(f.relative_to(folder)), "size": f.stat().st_size,
                 "oid": hashlib.sha1(f.read_bytes()).hexdigest()} for f in files
            ], body)  # fmt: skip
            return
        siblings = [
            {"rfilename": str(f.relative_to(folder)), "size": f.stat().st_size} for f in files
        ]
        self._json(200, {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}, body)

    def _json(
        self, status: int, value: Any, body: bool, headers: dict[str, str] | None = None
    ) -> None:
        data = json.dumps(value).encode()
        self._head(status, len(data), {"Content-Type": "application/json", **(headers or {})})
        if body:
            self.wfile.write(data)

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("X-Repo-Commit", COMMIT)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _file(self, repo: str, name: str, body: bool) -> None:
        file = self.server.repos.get(repo, Path("/nonexistent")) / name
        if not file.is_file():
            self._json(404, {"error": "no file"}, body, {"X-Error-Code": "EntryNotFound"})
            return
        data = file.read_bytes()
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        extra = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        if start:
            extra["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._head(206 if start else 200, len(data) - start, extra)
        if not body:
            return
        if name in self.server.stalled | self.server.broken:
            self.wfile.write(data[start : start + (len(data) - start) // 2])
            self.wfile.flush()
            self.server.half_sent.set()
            if name in self.server.stalled:
                self.server.closing.wait(60)
            self.close_connection = True
            return
        self.wfile.write(data[start:])
        self.server.sent[name] += 1
