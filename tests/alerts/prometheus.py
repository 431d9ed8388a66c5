"""A real Prometheus on loopback, with the rules that users get, their times 60 times shorter."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from octavo.server.deploy import rules
from tests.api.server import Server, free_port

FASTER = 60
EVERY = "500ms"  # between scrapes: 30 s of the time of the rules


class Prometheus:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **query: str) -> Any:
        address = f"{self.url}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            return json.load(answer)["data"]

    def firing(self, server: Server) -> set[str]:
        """Alerts of a server that are raised now."""
        return {
            a["labels"]["alertname"] for a in self.get("/api/v1/alerts")["alerts"]
            if a["state"] == "firing" and a["labels"]["instance"] == instance(server)
        }  # fmt: skip

    def fired(self, server: Server, since: float) -> set[str]:
        """Alerts of a server that were raised at any time since then, on the monotonic clock."""
        past = int(1000 * (time.monotonic() - since))
        alerts = f'ALERTS{{alertstate="firing",instance="{instance(server)}"}}'
        found = self.get("/api/v1/query", query=f"max_over_time({alerts}[{past}ms])")
        return {one["metric"]["alertname"] for one in found["result"]}

    def wait(self, server: Server, name: str, seconds: float = 30) -> None:
        """Until an alert is raised."""
        deadline = time.monotonic() + seconds
        while name not in self.firing(server):
            assert time.monotonic() < deadline, (
                f"{name} is not raised: {self.get('/api/v1/alerts')}"
            )
            time.sleep(0.1)

    def wait_quiet(self, server: Server, seconds: float = 30) -> None:
        """Until none of a server's alerts is raised any more."""
        deadline = time.monotonic() + seconds
        while found := self.firing(server):
            assert time.monotonic() < deadline, found
            time.sleep(0.1)


def instance(server: Server) -> str:
    return f"127.0.0.1:{server.port}"


@contextmanager
def watching(*servers: Server, folder: Path) -> Iterator[Prometheus]:
    """Scrapes servers until the end."""
    port = free_port()
    (folder / "rules.yaml").write_text(rules(FASTER))
    config = {
        "global": {"scrape_interval": EVERY, "scrape_timeout": EVERY, "evaluation_interval": EVERY},
        "rule_files": [str(folder / "rules.yaml")],
        "scrape_configs": [
            {"job_name": "octavo", "static_configs": [{"targets": [instance(s) for s in servers]}]}
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [
        "prometheus", f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield Prometheus(port)
        finally:
            process.terminate()
            process.wait(20)
