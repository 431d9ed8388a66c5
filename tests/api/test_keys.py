"""Keys in a PostgreSQL server, which goes away and comes back while Octavo serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psycopg
from gguf import GGMLQuantizationType

from tests import postgres
from tests.api.server import Server, serving
from tests.small_models import Small, save_gguf
from tests.waiting import until

PASSWORD = "p4ssw0rd-x"
BODY = {"model": "m", "prompt": [5, 6, 7, 8], "max_tokens": 2, "ignore_eos": True}


def octavo(*arguments: str, url: str) -> subprocess.CompletedProcess[str]:
    """A command, with the keys at the URL."""
    command = [sys.executable, "-P", "-m", "octavo.cli.main", *arguments]
    environ = os.environ | {"OCTAVO_KEYS": url}
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60)


def until_answered(server: Server, secret: str, wanted: int) -> None:
    """Waits for the status that a key's request has."""
    headers = {"Authorization": f"Bearer {secret}"}
    until(lambda: server.post("/v1/completions", BODY, headers)[0] == wanted)


def test_a_server_whose_keys_are_in_postgresql(tmp_path: Path) -> None:
    save_gguf(Small(), tmp_path / "m.gguf", GGMLQuantizationType.Q8_0)
    with postgres.running() as database:
        with psycopg.connect(database.url) as db:
            db.execute(f"create role team login superuser password '{PASSWORD}'")
        url = database.url.replace("octavo@", f"team:{PASSWORD}@")
        ann, bob = (octavo("key", "create", n, url=url).stdout.strip() for n in ("ann", "bob"))
        options = ("--memory", "150MiB", "--log-format", "json")
        log = tmp_path / "log"
        with serving(str(tmp_path / "m.gguf"), *options, log=log, env={"OCTAVO_KEYS": url}) as one:
            until_answered(one, ann, 200)
            assert octavo("key", "revoke", "bob", url=url).stdout == "revoked bob\n"
            until_answered(one, bob, 401)
            database.stop()
            headers = {"Authorization": f"Bearer {ann}"}
            assert one.post("/v1/completions", BODY, headers)[0] == 200
            until(lambda: "the keys stay as they were" in log.read_text())
            status, text = one.get("/v1/usage", headers)
            assert status == 503 and "team" not in text and "127.0.0.1" not in text
            until_answered(one, ann, 200)
            away = octavo("key", "list", url=url)
            database.start()
            eve = octavo("key", "create", "eve", url=url).stdout.strip()
            until_answered(one, eve, 200)
            until_answered(one, ann, 200)
            command_line = Path(f"/proc/{one.engine().pid}/cmdline").read_text()
        listed = json.loads(octavo("key", "list", "--json", url=url).stdout)
        used = json.loads(octavo("usage", "--json", url=url).stdout)
    assert [key["name"] for key in listed] == ["ann", "eve"]
    counts = {row["key"]: row["requests"] for row in used}
    assert counts["ann"] >= 4 and counts["eve"] == 1  # the first three while it was away too
    place = url.partition("@")[2]
    lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
    said = [json.loads(line)["message"] for line in lines]
    about = [line for line in said if "keys" in line]
    assert len(about) == 2 and about[1] == "the keys are read again"
    assert about[0].startswith(f"the keys stay as they were: postgresql://{place} cannot be used: ")
    assert away.returncode == 1 and f"pg_isready -d postgresql://{place}" in away.stderr
    told = log.read_text() + away.stdout + away.stderr + command_line
    assert not [secret for secret in (PASSWORD, ann, bob, eve) if secret in told]


def test_keys_that_are_away_at_the_start() -> None:
    url = f"postgresql://team:{PASSWORD}@127.0.0.1:1/x"
    done = octavo("serve", "m", url=url)
    assert done.returncode == 1 and PASSWORD not in done.stderr
    assert "postgresql://127.0.0.1:1/x cannot be used" in done.stderr
    assert "pg_isready -d postgresql://127.0.0.1:1/x" in done.stderr
