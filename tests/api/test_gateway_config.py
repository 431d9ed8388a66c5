"""The file of a gateway, a real process: reloads while streams run, bad files, history."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from octavo.cli.config import config
from octavo.errors import OctavoError
from octavo.gateway.config import GatewayConfig, convert, read_config
from tests.api.server import Server, free_port, serving
from tests.api.test_gateway import (
    ADMIN,
    client,
    running,
    simulated,
    streamed,
    text,
    upstreams,
)
from tests.waiting import until

KEYS = {"OCTAVO_ADMIN_KEY": "admin", "OCTAVO_UP": "up"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


@pytest.fixture(scope="module")
def slow(folder: Path) -> Iterator[Server]:
    with simulated(folder, "--step", "30") as server:
        yield server


@pytest.fixture(scope="module")
def other(folder: Path) -> Iterator[Server]:
    with simulated(folder) as server:
        yield server


def configured(file: Path, *pool: Server, **more: Any) -> dict[str, Any]:
    """Writes a file, whose first pool has these servers."""
    config = {
        "pools": {"default": {"upstreams": [s.url for s in pool]}}, "probe_interval": 0.2,
        "server": {"database": str(file.parent / "state.sqlite3")},
    } | more  # fmt: skip
    file.write_text(json.dumps(config))
    return config


def name(server: Server) -> str:
    return server.url.partition("://")[2]


def in_force(gateway: Server) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gateway.get("/v1/gateway/config", ADMIN)[1])
    return found


def hang_up(gateway: Server, version: int) -> None:
    """Sends SIGHUP, until that version is in force."""
    os.kill(gateway.process.pid, signal.SIGHUP)
    until(lambda: in_force(gateway)["version"] == version)


@pytest.fixture
def gateway(tmp_path: Path, slow: Server) -> Iterator[Server]:
    configured(tmp_path / "gateway.yaml", slow)
    arguments = ("--config", str(tmp_path / "gateway.yaml"))
    with serving(*arguments, log=tmp_path / "log", does="gateway", env=KEYS) as server:
        yield server


def test_upstreams_change_while_streams_run_and_none_is_lost(
    gateway: Server, tmp_path: Path, slow: Server, other: Server
) -> None:
    """One is added, one moves to another pool, one goes: its streams end where they are."""
    file = tmp_path / "gateway.yaml"
    expected = [text(other, f"c{i}", 60) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        had = [pool.submit(streamed, gateway, f"c{i}", 60) for i in range(3)]
        until(lambda: running(gateway)[name(slow)] == 3)
        configured(file, other, pools={"default": {"upstreams": [other.url]}, "next": {"upstreams": [slow.url]}}, max_inflight=7)  # fmt: skip
        hang_up(gateway, 2)
        assert {n: up["pool"] for n, up in upstreams(gateway).items()} == {name(slow): "next", name(other): "default"}  # fmt: skip
        until(lambda: upstreams(gateway)[name(other)]["state"] == "up")
        had += [pool.submit(streamed, gateway, f"c{i}", 60) for i in range(3, 6)]
        until(lambda: running(gateway)[name(other)] + had[3].done() >= 1)
        assert running(gateway)[name(slow)] == 3  # the new ones went to the other pool
        configured(file, other, pools={"default": {"upstreams": [other.url]}})
        hang_up(gateway, 3)
        assert upstreams(gateway)[name(slow)]["state"] == "draining"
        assert [answer.result() for answer in had] == expected
    until(lambda: list(upstreams(gateway)) == [name(other)])
    assert gateway.metric("octavo_upstream_failovers_total") == 0
    config = in_force(gateway)["config"]
    assert config["max_inflight"] == 256 and list(config["pools"]) == ["default"]


def test_what_an_admin_has_removed_is_back_once_the_file_is_read_again(
    gateway: Server, slow: Server
) -> None:
    assert gateway.post("/v1/upstreams/remove", {"upstream": name(slow)}, ADMIN)[0] == 200
    assert upstreams(gateway) == {}
    done = gateway.post("/v1/gateway/config/reload", {}, ADMIN)[1]
    assert done["applied"] and done["changes"] == []
    until(lambda: upstreams(gateway)[name(slow)]["state"] == "up")
    assert text(gateway, "x") == text(slow, "x")


def test_names_of_one_address_are_upstreams_of_their_pools(
    gateway: Server, tmp_path: Path, slow: Server
) -> None:
    port = slow.url.rpartition(":")[2]
    dns = {"default": {"dns": [f"http://localhost:{port}"]}, "next": {"dns": [slow.url]}}
    configured(tmp_path / "gateway.yaml", pools=dns)
    assert gateway.post("/v1/gateway/config/reload", {}, ADMIN)[0] == 200
    pools = {f"localhost:{port}@127.0.0.1:{port}": "default", f"127.0.0.1:{port}": "next"}

    def both() -> bool:
        found = {n: up["pool"] for n, up in upstreams(gateway).items() if up["state"] == "up"}
        return found == pools

    until(both)
    assert text(gateway, "x") == text(slow, "x")
    named = next(iter(pools))
    assert gateway.metric("octavo_upstream_requests_total", replica=named) == 1
    assert gateway.post("/v1/upstreams/drain", {"upstream": named}, ADMIN)[0] == 200
    assert upstreams(gateway)[named]["state"] == "draining"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_inflight": 0}, "max_inflight: Expected `int` >= 1"),
    ({"server": {"port": 1}}, "server.port is only read at the start"),
    ({"upstream_key": "${OCTAVO_UNSET}"}, "OCTAVO_UNSET is not set"),
    ({"pools": {"default": {"file": "/nowhere"}}}, "'/nowhere' cannot be read"),
    ({"pools": {"default": {"dns": ["http://no.such.name.invalid"]}}}, "nobody knows this name"),
]  # fmt: skip


def test_a_bad_file_changes_nothing(gateway: Server, tmp_path: Path, slow: Server) -> None:
    before = in_force(gateway)
    for changed, says in WRONG:
        configured(tmp_path / "gateway.yaml", slow, **changed)
        status, body = gateway.post("/v1/gateway/config/reload", {}, ADMIN)
        assert status == 400 and says in body["error"]["message"]
    os.kill(gateway.process.pid, signal.SIGHUP)
    until(lambda: f"{says}; the configuration stays as it is" in gateway.log.read_text())
    assert in_force(gateway) == before
    assert text(gateway, "x") == text(slow, "x")


def test_admins_change_it_and_go_back(gateway: Server, slow: Server, other: Server) -> None:
    first = in_force(gateway)
    assert (first["version"], first["who"]) == (1, "start")
    second = first["config"] | {"pools": {"default": {"upstreams": [slow.url, other.url]}}, "models": {"simulated": {"pool": "default"}}}  # fmt: skip
    tried = gateway.post("/v1/gateway/config?dry_run=true", second, ADMIN)[1]
    line = f'+ pools.default.upstreams[{other.url}]: "{other.url}"'
    assert tried == {"applied": False, "changes": ['+ models.simulated.fallback: ["fallback"]', '+ models.simulated.pool: "default"', line]}  # fmt: skip
    assert in_force(gateway) == first and len(upstreams(gateway)) == 1
    done = gateway.post("/v1/gateway/config", second, ADMIN)[1]
    assert done["changes"] == tried["changes"] and (done["version"], done["who"]) == (2, "admin")
    assert len(upstreams(gateway)) == 2
    status, body = gateway.post("/v1/gateway/config", second | {"max_queue": -1}, ADMIN)
    assert (status, body["error"]["message"]) == (400, "max_queue: Expected `int` >= 0")
    status, body = gateway.post("/v1/gateway/config?version=1", second, ADMIN)
    assert (status, body["error"]["message"]) == (409, "version 2 of the configuration is in force, not 1: read it again")  # fmt: skip
    back = gateway.post("/v1/gateway/config/rollback", {"version": 1}, ADMIN)[1]
    assert (back["version"], back["hash"]) == (3, first["hash"])
    history = json.loads(gateway.get("/v1/gateway/config/history", ADMIN)[1])["configs"]
    assert [one["version"] for one in history] == [3, 2, 1]
    kept = json.loads(gateway.get("/v1/gateway/config?version=2", ADMIN)[1])["config"]
    assert len(kept["pools"]["default"]["upstreams"]) == 2
    assert gateway.post("/v1/gateway/config/rollback", {"version": 9}, ADMIN)[0] == 404
    for version in (2**63, 2**64, -1):  # which are no number of a database, or of any version
        assert gateway.post("/v1/gateway/config/rollback", {"version": version}, ADMIN)[0] == 400
    assert gateway.get("/v1/gateway/config", {})[0] == 401
    assert gateway.post("/v1/gateway/config", second, {})[0] == 401
    until(lambda: list(upstreams(gateway)) == [name(slow)])


@pytest.mark.parametrize("flag", ["true", "True", "TRUE", "1"])
def test_what_is_only_tried_changes_nothing(gateway: Server, flag: str) -> None:
    before = in_force(gateway)
    tried = before["config"] | {"max_queue": 7}
    status, body = gateway.post(f"/v1/gateway/config?dry_run={flag}", tried, ADMIN)
    assert (status, body) == (200, {"applied": False, "changes": ["~ max_queue: 1024 -> 7"]})
    assert in_force(gateway) == before


def test_a_query_that_is_not_understood_changes_nothing(gateway: Server) -> None:
    """Whoever misspells that it is only to be tried does not have it done."""
    before, path = in_force(gateway), "/v1/gateway/config"
    for query, says in (
        ("dry_run=maybe", "dry_run is true, false, 1 or 0, not 'maybe'"),
        ("dry_run", "dry_run is true, false, 1 or 0, not ''"),
        ("dryrun=true", "the query takes dry_run and version, not 'dryrun'"),
        ("dry_run=1&dry_run=0", "dry_run is in the query 2 times"),
    ):
        status, body = gateway.post(f"{path}?{query}", {}, ADMIN)
        assert (status, body["error"]["message"]) == (400, says)
    for action, given in (("rollback", {"version": 1}), ("reload", {})):
        status, body = gateway.post(f"{path}/{action}?dry_run=true", given, ADMIN)
        says = "the query takes nothing, not 'dry_run'"
        assert (status, body["error"]["message"]) == (400, says)
    assert gateway.get(f"{path}?versoin=1", ADMIN)[0] == 400
    assert in_force(gateway) == before
    done = gateway.post(f"{path}?dry_run=False", before["config"] | {"max_queue": 7}, ADMIN)[1]
    assert done["applied"] and in_force(gateway)["config"]["max_queue"] == 7


def test_a_file_is_compared_with_what_is_in_force(
    gateway: Server, tmp_path: Path, slow: Server
) -> None:
    file = tmp_path / "new.yaml"
    configured(file, slow, max_queue=3)
    arguments = ("--config", str(file), "--check", "--server", gateway.url)
    command = [sys.executable, "-P", "-m", "octavo.cli.main", "gateway", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | KEYS, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "~ max_queue: 1024 -> 3\n")


def test_commands_show_the_history_and_go_back(
    gateway: Server, tmp_path: Path, slow: Server
) -> None:
    def do(*words: str) -> str:
        options = ["--server", gateway.url, "--admin-key", "admin"]
        return CliRunner().invoke(config, [*words, *options], catch_exceptions=False).output

    first = in_force(gateway)["config"]
    gateway.post("/v1/gateway/config", first | {"max_queue": 7}, ADMIN)
    rows = [line.split() for line in do("list").splitlines()[1:]]
    assert [(row[0], row[-2]) for row in rows] == [("*", "admin"), ("1", "start")]
    assert json.loads(do("show"))["max_queue"] == 7
    shown = do("show", "1")
    assert json.loads(shown) == first
    assert do("rollback", "1") == "~ max_queue: 7 -> 1024\nconfiguration 3 is in force\n"
    assert in_force(gateway)["config"] == first
    assert json.loads(do("list", "--json"))["configs"][0]["version"] == 3
    with pytest.raises(OctavoError, match="no configuration 9 is kept"):
        do("rollback", "9")
    (tmp_path / "shown.yaml").write_text(shown)
    assert read_config(tmp_path / "shown.yaml").running == convert(first, GatewayConfig)


def test_a_prepared_answer_when_nobody_answers(tmp_path: Path, other: Server) -> None:
    """Marked, never for what upstreams refuse, and counted as the error that it hides."""
    said = "We are busy. Please ask again in a minute."
    dead, model = {"upstreams": [f"http://127.0.0.1:{free_port()}"]}, {"prepared_answer": said}
    file, log = tmp_path / "gateway.yaml", tmp_path / "log"
    configured(file, pools={"default": dead}, models={"simulated": model}, queue_timeout=0.5)
    gateway = Server("--config", str(file), log=log, does="gateway", env=KEYS)
    try:
        until(lambda: gateway.get("/health/live")[0] == 200)
        asked = client(gateway)
        chat: Any = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}]}
        raw = asked.chat.completions.with_raw_response.create(**chat)
        assert raw.headers["x-fallback"] == "prepared"
        assert raw.parse().choices[0].message.content == said
        chunks = list(asked.chat.completions.create(**chat, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == said
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert text(gateway, "x") == streamed(gateway, "x") == said
        until(lambda: gateway.metric("octavo_gateway_prepared_total") == 4)  # counted once sent
        assert gateway.metric("octavo_upstream_requests_total", status="503") == 4
        for path, body in (("/v1/embeddings", {"input": "x"}), ("/v1/completions", {"model": "o"})):
            assert gateway.post(path, {"model": "simulated"} | body)[0] == 503
        configured(file, other, models={"simulated": model}, queue_timeout=0.5)
        hang_up(gateway, 2)
        until(lambda: gateway.get("/health/ready")[0] == 200)
        assert text(gateway, "x") == text(other, "x")
        many = {"model": "simulated", "prompt": "x", "max_tokens": "many"}
        assert gateway.post("/v1/completions", many)[0] == 400
        assert gateway.metric("octavo_gateway_prepared_total") == 4
    finally:
        gateway.stop()
