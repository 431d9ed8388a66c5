"""Servers that a gateway owns, real processes: updates under load, deaths, ends, too little memory."""

from __future__ import annotations

import json
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from octavo.cli.release import release
from octavo.errors import OctavoError
from tests.api.server import Server, serving
from tests.small_models import Q, Small
from tests.waiting import until

KEYS = {"OCTAVO_ADMIN_KEY": "admin"}
ADMIN = {"authorization": "Bearer admin"}
QUICK = ("--steps", "50,100", "--hold", "1s", "--min-events", "5")
FIRST = {"name": "m", "memory": "200MiB", "context": 256, "threads": 1}
MORE = {"probe_interval": 0.2, "server": {"drain_timeout": 5}}


@pytest.fixture(scope="module")
def versions(small_gguf: Callable[..., Path]) -> list[Path]:
    """Two models that say different things."""
    return [small_gguf(Small(layers=n), Q.Q8_0) for n in (2, 3)]


@contextmanager
def started(folder: Path, model: Path) -> Iterator[Server]:
    """A gateway with one server of its own."""
    file = folder / "gateway.yaml"
    pool = {"local": FIRST | {"model": str(model)}}
    file.write_text(json.dumps({"pools": {"default": pool}} | MORE))
    with serving("--config", str(file), log=folder / "log", does="gateway", env=KEYS) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, versions: list[Path]) -> Iterator[Server]:
    with started(tmp_path_factory.mktemp("gateway"), versions[0]) as server:
        yield server


def owned(gateway: Server) -> list[psutil.Process]:
    """The servers of a gateway, but for those that have just ended."""
    found = []
    for child in psutil.Process(gateway.process.pid).children():
        with suppress(psutil.NoSuchProcess):
            found += [child] * ("octavo.cli.main" in child.cmdline())
    return found


def family(gateway: Server) -> list[psutil.Process]:
    return psutil.Process(gateway.process.pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def said(server: Server, number: int) -> str:
    """The text that a request is answered with, streamed if its number is odd."""
    stream = number % 2 == 1
    body = {"model": "m", "prompt": "Once upon", "max_tokens": 24, "temperature": 0, "ignore_eos": True,
            "user": f"user-{number}", "stream": stream}  # fmt: skip
    status, text = server.call("POST", "/v1/completions", json.dumps(body).encode())
    assert status == 200, text
    if not stream:
        return str(json.loads(text)["choices"][0]["text"])
    assert text.endswith("data: [DONE]\n\n"), text
    chunks = [json.loads(e[6:]) for e in text.split("\n\n")[:-2] if not e.startswith(":")]
    return "".join(c["choices"][0]["text"] for c in chunks)


class Load:
    """Clients that ask for as long as this is open. texts: what they were told."""

    def __init__(self, server: Server, clients: int = 4) -> None:
        self._server, self._clients = server, clients
        self._over = threading.Event()
        self.texts: list[str] = []

    def _ask(self, client: int) -> None:
        number = client
        while not self._over.is_set():
            self.texts.append(said(self._server, number))
            number += self._clients + 1  # streamed and not, by turns

    def __enter__(self) -> Load:
        self._pool = ThreadPoolExecutor(self._clients)
        self._asking = [self._pool.submit(self._ask, i) for i in range(self._clients)]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for one in self._asking:
            one.result()
        self._pool.shutdown()


def pools(gateway: Server) -> dict[str, str]:
    """The models of the pools of the configuration."""
    found = json.loads(gateway.get("/v1/gateway/config", ADMIN)[1])["config"]["pools"]
    return {name: pool["local"]["model"] for name, pool in found.items()}


def run(gateway: Server, *words: str) -> str:
    """What `octavo release` prints. Raises OctavoError."""
    command = [*words, "--server", gateway.url, "--admin-key", "admin"]
    result = CliRunner().invoke(release, command)
    if isinstance(result.exception, OctavoError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_its_servers_tell_a_gateway_what_they_hold_and_nobody_else(gateway: Server) -> None:
    until(lambda: '"tells_cache":true' in gateway.get("/v1/upstreams", ADMIN)[1])
    (one,) = json.loads(gateway.get("/v1/upstreams", ADMIN)[1])["upstreams"]
    request = urllib.request.Request(one["url"] + "/v1/cache/events")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=10)


def test_updates_under_load_lose_nothing(gateway: Server, versions: list[Path]) -> None:
    """From the first version to the second and back, then one that its guard takes back."""
    first, second = map(str, versions)
    old = said(gateway, 0)
    (before,) = owned(gateway)
    with Load(gateway) as load:
        assert "default-next" in run(gateway, "update", "m", "--to", second, *QUICK)
        until(lambda: pools(gateway) == {"default-next": second})
        until(lambda: gone([before]))
    new = said(gateway, 0)
    assert new != old and set(load.texts) == {old, new}

    with Load(gateway) as load:
        run(gateway, "update", "m", "--to", first, *QUICK)
        until(lambda: pools(gateway) == {"default": first})
    assert set(load.texts) == {old, new} and said(gateway, 0) == old

    until(lambda: len(owned(gateway)) == 1)
    (kept,) = owned(gateway)
    file = gateway.log.parent / "release.yaml"
    file.write_text("{steps: [1, 100], shadow: 100%, guards: [{metric: shadow_kl, max: 0.01}]}")
    with Load(gateway) as load:
        run(gateway, "update", "m", "--to", second, "--file", str(file))
        (tried,) = [p for p in owned(gateway) if p != kept]
        until(lambda: "rolled_back" in run(gateway, "status", "m"))
    assert set(load.texts) <= {old, new}
    until(lambda: gone([tried]))
    assert owned(gateway) == [kept] and pools(gateway) == {"default": first}
    assert {said(gateway, n) for n in range(8)} == {old}


def test_what_does_not_start_or_fit_changes_nothing(
    gateway: Server, versions: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(OctavoError, match=r"local pools do not fit: default-next 1 x 9[\d.]+ GiB"):
        run(gateway, "update", "m", "--to", str(versions[1]), "--memory", "9000GiB")
    with pytest.raises(OctavoError, match="no file or folder './nowhere.gguf'"):
        run(gateway, "update", "m", "--to", "./nowhere.gguf")
    with pytest.raises(OctavoError, match="'x' is served by no local pool"):
        run(gateway, "update", "x", "--to", str(versions[1]))
    with pytest.raises(OctavoError, match="a release needs guards"):
        file = tmp_path / "release.yaml"
        file.write_text("guards: []")
        run(gateway, "update", "m", "--to", str(versions[1]), "--file", str(file))
    assert pools(gateway) == {"default": str(versions[0])} and len(owned(gateway)) == 1


def test_a_killed_server_comes_back(gateway: Server) -> None:
    text = said(gateway, 0)
    (server,) = owned(gateway)
    with ThreadPoolExecutor(1) as pool:
        server.kill()
        assert pool.submit(said, gateway, 1).result() == text  # waits for the next
    (second,) = owned(gateway)
    assert second != server
    assert "default/0 has ended" in gateway.log.read_text()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_gateway(versions: list[Path], tmp_path: Path, sig: int) -> None:
    with started(tmp_path, versions[0]) as gateway:
        found = family(gateway)
        assert len(found) >= 2
        gateway.stop(sig)
        until(lambda: gone(found))
