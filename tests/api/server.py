"""A real server process for tests: started, watched and ended by id."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests import published
from tests.waiting import SECONDS, until


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    """`octavo serve` on a free port, or what else it does.

    cwd: to start it from. handles: most files it may open. env: more variables.
    """

    def __init__(
        self, *arguments: str, log: Path, cwd: Path | None = None, handles: int | None = None,
        env: dict[str, str] | None = None, does: str = "serve",
    ) -> None:  # fmt: skip
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.headers: dict[str, str] = {}  # of GETs that name none
        self._out = log.open("wb")
        command = [
            sys.executable,
            "-P",  # as the installed command is
            "-m",
            "octavo.cli.main",
            does,
            *arguments,
            "--port",
            str(self.port),
        ]
        if handles is not None:
            command = ["prlimit", f"--nofile={handles}:{handles}", *command]
        self.process = subprocess.Popen(
            command, stdout=self._out, stderr=self._out, stdin=subprocess.DEVNULL, cwd=cwd,
            env=os.environ | (env or {}),
        )  # fmt: skip

    def wait_ready(self, seconds: float = SECONDS) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return self.get("/health/ready")[0] == 200

        until(ready, seconds)

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
        return self.call("GET", path, None, self.headers if headers is None else headers)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, text = self.call("POST", path, data, headers)
        return status, json.loads(text)

    def call(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str] | None = None
    ) -> tuple[int, str]:
        request = urllib.request.Request(self.url + path, data, headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                text = response.read().decode()
                published.check(path, response.status, text, data or b"")
                return response.status, text
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode()
        except OSError:
            return 0, ""

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all models of a metric's samples that have these labels."""
        families = text_string_to_metric_families(self.get("/metrics")[1])
        samples = [s for f in families for s in f.samples if s.name == name]
        found = [s.value for s in samples if labels.items() <= s.labels.items()]
        assert found, f"no metric {name}"
        return sum(found)

    def wait_idle(self, seconds: float = SECONDS) -> None:
        """Until nothing runs and no block is held."""

        def idle() -> bool:
            busy = [self.metric(f"octavo_requests_{state}") for state in ("running", "waiting")]
            return not any([*busy, self.metric("octavo_kv_blocks", state="held")])

        until(idle, seconds)

    def engine(self) -> psutil.Process:
        """The process that loads the model; others compile grammars."""
        children = psutil.Process(self.process.pid).children()
        (engine,) = [c for c in children if "octavo.client.engine_process" in c.cmdline()]
        return engine

    def stop(self, sig: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            os.kill(self.process.pid, sig)
        try:
            return self.process.wait(40)
        finally:
            self._out.close()


@contextmanager
def serving(*arguments: str, log: Path, **started: Any) -> Iterator[Server]:
    server = Server(*arguments, log=log, **started)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()
