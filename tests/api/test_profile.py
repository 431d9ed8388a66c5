"""`POST /v1/profile` and `octavo profile` on real servers."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from octavo.bench.accounting import account, engines_of, nested
from octavo.cli.profile import profile
from octavo.errors import UsageError
from octavo.generate.trace import TraceFile
from tests.api.server import Server, serving
from tests.waiting import until

ADMIN = {"Authorization": "Bearer admin"}
SECRET = "Antarctica"
ASKED: dict[str, Any] = {"prompt": f"{SECRET} is", "max_tokens": 32, "temperature": 0, "ignore_eos": True}  # fmt: skip


@pytest.fixture(scope="module")
def server(smollm2: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with serving("smollm2", "--offline", "--admin-key", "admin", "--api-key", "user", log=log) as s:
        yield s


def complete(server: Server) -> Any:
    status, answer = server.post("/v1/completions", ASKED, ADMIN)
    assert status == 200
    return answer["choices"][0]["text"]


def record(server: Server, seconds: float) -> tuple[int, Any]:
    return server.post("/v1/profile", {"seconds": seconds}, ADMIN)


def test_a_server_is_profiled_while_it_answers(server: Server) -> None:
    expected = complete(server)
    with ThreadPoolExecutor() as pool:
        recording, texts = pool.submit(record, server, 1), set()
        while not recording.done():
            texts.add(complete(server))
        status, found = recording.result()
    assert (status, texts) == (200, {expected})
    trace = msgspec.convert(found, TraceFile)
    (engine,) = engines_of(trace)
    assert engine.pid == server.engine().pid and 0.5 < engine.seconds < 10
    for thread in range(engine.threads):
        spans = [e for e in trace.traceEvents if e.ph == "X" and (e.pid, e.tid) == (engine.pid, thread)]  # fmt: skip
        assert len(list(nested(spans))) == len(spans)  # 0 of a thread that had no core to run on
    spent = account(trace, engine)
    assert {"schedule", "record", "execute", "sample", "commit", "tell", "attention"} <= set(spent.spent)  # fmt: skip
    assert 0 < spent.known <= spent.busy <= spent.seconds
    (front,) = [p for p in trace.otherData.processes if p.name == "front"]
    assert front.pid == server.process.pid
    assert account(trace, front).spent["detokenize"].count >= 32
    assert SECRET not in json.dumps(found)
    assert any("Engine.step" in stack for stack in engine.stacks)
    # As it was before: another profile of nothing, and no text has changed.
    assert record(server, 0.1)[0] == 200
    assert complete(server) == expected


def test_one_profile_at_a_time_and_for_admins(server: Server) -> None:
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda _: record(server, 0.5), range(3)))
    assert sorted(status for status, _ in found) == [200, 409, 409]
    refused = next(body["error"] for status, body in found if status == 409)
    assert refused["code"] == "profile_running" and "being profiled" in refused["message"]
    status, body = server.post("/v1/profile", {"seconds": 1}, {"Authorization": "Bearer user"})
    assert (status, body["error"]["code"]) == (403, "admin_key_required")
    for seconds in (0, 61, -1):
        status, body = record(server, seconds)
        assert (status, body["error"]["param"]) == (400, "seconds")
    assert record(server, 0.1)[0] == 200


def test_who_leaves_ends_the_profile(server: Server) -> None:
    gone = http.client.HTTPConnection("127.0.0.1", server.port)
    gone.request("POST", "/v1/profile", '{"seconds": 60}', ADMIN)
    until(lambda: '"/v1/profile"' in server.get("/v1/requests", ADMIN)[1])
    gone.close()
    until(lambda: record(server, 0.1)[0] == 200)


def test_an_engine_that_dies_ends_its_profile(server: Server) -> None:
    expected = complete(server)
    with ThreadPoolExecutor() as pool:
        recording = pool.submit(record, server, 20)
        until(lambda: '"/v1/profile"' in server.get("/v1/requests", ADMIN)[1])
        assert complete(server) == expected  # by when it has begun
        os.kill(server.engine().pid, signal.SIGKILL)
        assert complete(server) == expected
    status, body = recording.result()
    assert (status, body["error"]["code"]) == (500, "engine_error")
    assert record(server, 0.1)[0] == 200


def test_the_command_shows_a_server(server: Server, tmp_path: Path) -> None:
    out, stacks = tmp_path / "t.json", tmp_path / "s.txt"
    arguments = ["--server", server.url, "--seconds", "0.5", "--output", str(out), "--stacks", str(stacks)]  # fmt: skip
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(complete, server)
        shown = CliRunner().invoke(
            profile, [*arguments, "--admin-key", "admin"], catch_exceptions=False
        )
        answer.result()
    assert shown.exit_code == 0 and "accounted for:" in shown.output and "KV cache" in shown.output
    assert msgspec.json.decode(out.read_bytes(), type=TraceFile).traceEvents
    assert all(line.rpartition(" ")[2].isdigit() for line in stacks.read_text().splitlines())
    with pytest.raises(UsageError, match="needs an admin's key"):
        CliRunner().invoke(profile, [*arguments, "--admin-key", "user"], catch_exceptions=False)


def test_the_command_profiles_a_request(smollm2: object, tmp_path: Path) -> None:
    request, out = tmp_path / "request.json", tmp_path / "t.json"
    request.write_text(
        json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8})
    )
    arguments = ["smollm2", "--offline", "--output", str(out)]
    shown = CliRunner().invoke(profile, [*arguments, "--request", str(request)], catch_exceptions=False)  # fmt: skip
    assert shown.exit_code == 0 and "% of roofline" in shown.output and "weights" in shown.output
    trace = msgspec.json.decode(out.read_bytes(), type=TraceFile)
    (engine,) = engines_of(trace)
    assert account(trace, engine).share > 0.5
    request.write_text('{"messages": []}')
    with pytest.raises(UsageError, match="refused"):
        CliRunner().invoke(profile, [*arguments, "--request", str(request)], catch_exceptions=False)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "name a model"),
        (["--server", "http://127.0.0.1:9", "--prompt", "x"], "none of its own"),
        (["--server", "http://127.0.0.1:9"], "does not answer"),
    ],
)
def test_what_cannot_be_profiled_is_refused(arguments: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        CliRunner().invoke(profile, arguments, catch_exceptions=False)
