"""A gateway before real processes: what they do to it, and what clients notice."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.api import faulty
from tests.api.faulty import Faulty
from tests.api.server import Server, free_port, serving
from tests.terminal import OCTAVO
from tests.waiting import until

ADMIN = {"Authorization": "Bearer admin"}
QUICK = (
    "--first-token-timeout", "4", "--idle-timeout", "2", "--probe-interval", "0.2",
    "--queue-timeout", "10", "--connect-timeout", "2", "--routing", "round-robin",
    "--admin-key", "admin",
)  # fmt: skip
STREAMS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gateway")


@contextmanager
def simulated(folder: Path, *arguments: str) -> Iterator[Server]:
    log = folder / f"simulated-{free_port()}.log"
    with serving("--step", "5", *arguments, log=log, does="simulate") as server:
        yield server


@pytest.fixture(scope="module")
def good(folder: Path) -> Iterator[Server]:
    with simulated(folder) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(folder: Path, good: Server) -> Iterator[Server]:
    arguments = ("--upstream", good.url, *QUICK)
    with serving(*arguments, log=folder / "gateway.log", does="gateway") as server:
        yield server


@contextmanager
def behind(gateway: Server, url: str, state: str = "up") -> Iterator[str]:
    """An upstream, added while the gateway serves, and removed again."""
    reply = gateway.post("/v1/upstreams", {"upstream": url}, ADMIN)[1]
    name = reply["upstreams"][0]["id"]
    until(lambda: upstreams(gateway)[name]["state"] == state)
    try:
        yield name
    finally:
        gateway.post("/v1/upstreams/remove", {"upstream": name}, ADMIN)


def upstreams(gateway: Server) -> dict[str, Any]:
    reply = json.loads(gateway.get("/v1/upstreams", ADMIN)[1])
    return {up["id"]: up for up in reply["upstreams"]}


@cache
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=30)


def text(server: Server, prompt: str, tokens: int = 8, model: str = "simulated") -> str:
    reply = client(server).completions.create(model=model, prompt=prompt, max_tokens=tokens)
    return reply.choices[0].text


def streamed(server: Server, prompt: str, tokens: int = 8) -> str:
    """The text of a stream, which has one id and an end; read with little work."""
    body = {"model": "simulated", "prompt": prompt, "max_tokens": tokens, "stream": True}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        raw = response.read().decode()
    assert raw.endswith("\n\ndata: [DONE]\n\n"), raw[-300:]
    chunks = [json.loads(event[6:]) for event in raw.split("\n\n")[:-2]]
    assert len({c["id"] for c in chunks}) == 1
    return "".join(c["choices"][0]["text"] for c in chunks)


def at_rest(gateway: Server) -> None:
    """Nothing is counted any longer, and nothing is held."""
    until(lambda: not any(u["running"] + u["waiting"] + u["waiting_tokens"] for u in upstreams(gateway).values()))  # fmt: skip


@pytest.mark.parametrize(
    "fault",
    [faulty.says_nothing, faulty.closes, faulty.resets, faulty.garbage, faulty.only_headers,
     faulty.page("502 Bad Gateway"), faulty.page("200 OK")],
    ids=["says-nothing", "closes", "resets", "garbage", "only-headers", "html-502", "html-200"],
)  # fmt: skip
def test_nobody_notices_what_fails_before_the_first_byte(
    gateway: Server, good: Server, fault: faulty.Behaviour
) -> None:
    """Its health lies: it says which models it has, and answers nothing."""
    with faulty.faulty(fault) as bad, behind(gateway, bad.url):
        for i in range(2):
            assert streamed(gateway, f"p{i}") == text(good, f"p{i}")
        assert bad.posts >= 1
        at_rest(gateway)


def test_whole_answers_are_tried_elsewhere(gateway: Server, good: Server) -> None:
    with faulty.faulty(faulty.resets) as bad, behind(gateway, bad.url):
        answers = [text(gateway, f"w{i}") for i in range(3)]
        assert bad.posts >= 1
    assert answers == [text(good, f"w{i}") for i in range(3)]


def test_one_that_is_busy_is_left_alone_as_long_as_it_says(gateway: Server, good: Server) -> None:
    """It is the least loaded of all, as it refuses everything."""
    fault = faulty.page("503 Busy\r\nretry-after: 20")
    with faulty.faulty(fault) as bad, behind(gateway, bad.url):
        answers = [text(gateway, f"b{i}") for i in range(12)]
        assert bad.posts == 1
    assert answers == [text(good, f"b{i}") for i in range(12)]


def test_one_that_fails_gets_nothing_for_a_while(gateway: Server, good: Server) -> None:
    with faulty.faulty(faulty.resets) as bad, behind(gateway, bad.url) as name:
        for i in range(14):
            text(gateway, f"b{i}")
        assert upstreams(gateway)[name]["breaker"] != "closed"
        assert bad.posts <= 7


def test_a_doctor_names_what_is_down_and_what_fails(gateway: Server, good: Server) -> None:
    def named() -> dict[str, str]:
        words = ["doctor", "--server", gateway.url, "--json", "--admin-key", "admin"]
        done = subprocess.run([*OCTAVO, *words], capture_output=True, text=True, timeout=60)
        found = {f["name"]: f["meaning"] for f in json.loads(done.stdout)["findings"]}
        return {name: said for name, said in found.items() if "upstream" in name.lower()}

    assert named() == {}
    with behind(gateway, f"http://127.0.0.1:{free_port()}", "down") as name:
        assert named() == {
            "OctavoUpstreamDown": "1 upstreams of the gateway do not answer",
            "upstream_down": f"upstream {name} takes no connection",
        }
    with faulty.faulty(faulty.page("502 Bad Gateway")) as bad, behind(gateway, bad.url) as name:
        while upstreams(gateway)[name]["breaker"] == "closed":
            text(gateway, "Hello")
        assert named() == {
            "OctavoUpstreamFailing": "1 upstreams of the gateway get next to nothing, because requests to them failed",
            "upstream_failing": f"upstream {name} gets next to nothing: requests to it failed",
        }  # fmt: skip


def test_a_doctor_says_why_nobody_answers(folder: Path, good: Server) -> None:
    """The one upstream, a gateway itself, wants a key; then there is none."""

    def said(gateway: Server) -> str:
        words = ["doctor", "--server", gateway.url, "--admin-key", "admin"]
        done = subprocess.run([*OCTAVO, *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        return done.stdout

    guarded, log = ("--upstream", good.url, "--api-key", "k"), folder / "guarded.log"
    with serving(*guarded, log=log, does="gateway") as wanting:
        words = (*QUICK, "--upstream", wanting.url)
        gateway = Server(*words, log=folder / "alone.log", does="gateway")
        try:
            name = wanting.url.removeprefix("http://")
            until(lambda: gateway.get("/health/ready")[0] == 503)
            until(lambda: [up["state"] for up in upstreams(gateway).values()] == ["down"])
            assert f"upstream {name} answers /v1/models with 401; it wants a key (--upstream-key)" in said(gateway)  # fmt: skip
            gateway.post("/v1/upstreams/remove", {"upstream": name}, ADMIN)
            assert "No upstream of the gateway is up" in said(gateway)
        finally:
            gateway.stop()


def test_one_that_takes_connections_and_says_nothing_is_never_asked(gateway: Server) -> None:
    with faulty.faulty(faulty.byte_by_byte, healthy=False) as bad:
        with behind(gateway, bad.url, state="starting") as name:
            until(lambda: upstreams(gateway)[name]["state"] == "down")
            assert "in time" in upstreams(gateway)[name]["reason"]
            text(gateway, "x"), text(gateway, "y")
            assert bad.posts == 0


@contextmanager
def foreign(gateway: Server, good: Server, fault: faulty.Behaviour) -> Iterator[Faulty]:
    """Only one upstream, which is not Octavo."""
    name = good.url.partition("://")[2]
    gateway.post("/v1/upstreams/drain", {"upstream": name}, ADMIN)
    try:
        with faulty.faulty(fault) as bad, behind(gateway, bad.url):
            yield bad
    finally:
        gateway.post("/v1/upstreams", {"upstream": good.url}, ADMIN)
        until(lambda: upstreams(gateway)[name]["state"] == "up")


@pytest.mark.parametrize(
    ("fault", "says"),
    [(faulty.breaks_off, "ended in the middle"), (faulty.falls_silent, "said nothing for 6 s")],
)
def test_a_stream_of_others_that_breaks_ends_with_an_error(
    gateway: Server, good: Server, fault: faulty.Behaviour, says: str
) -> None:
    had = []
    asked = client(gateway)
    with foreign(gateway, good, fault):
        with pytest.raises(openai.APIError) as raised:
            stream = asked.completions.create(model="simulated", prompt="x", stream=True)
            had.extend(c.choices[0].text for c in stream)
        assert says in raised.value.message
        assert had == [" one"]
        at_rest(gateway)


def test_a_stream_in_single_bytes(gateway: Server, good: Server) -> None:
    with foreign(gateway, good, faulty.byte_by_byte):
        assert streamed(gateway, "x") == " one two"


def test_what_breaks_after_its_end_is_whole(gateway: Server, good: Server) -> None:
    """The end of the stream has come, that of the connection is a reset: nothing is said twice."""
    name = good.url.partition("://")[2]
    for owner in ("octavo", "somebody"):
        fault = faulty.never_closes(owner == "octavo")
        with faulty.faulty(fault, owner=owner) as bad, behind(gateway, bad.url):
            gateway.post("/v1/upstreams/drain", {"upstream": name}, ADMIN)
            assert streamed(gateway, "x") == " one two"
            gateway.post("/v1/upstreams", {"upstream": good.url}, ADMIN)
            until(lambda: upstreams(gateway)[name]["state"] == "up")
            assert bad.posts == 1


def test_a_client_that_leaves_is_felt_upstream(gateway: Server, good: Server) -> None:
    with foreign(gateway, good, faulty.goes_on_and_on) as endless:
        body = json.dumps({"model": "simulated", "prompt": "x", "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", gateway.port)) as leaving:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
            leaving.sendall(head.encode() + body)
            assert leaving.recv(1000)
        assert endless.left.wait(5)
        at_rest(gateway)


def test_a_client_that_reads_late_misses_nothing(gateway: Server, good: Server) -> None:
    with foreign(gateway, good, faulty.floods):
        body = json.dumps({"model": "simulated", "prompt": "x", "stream": True}).encode()
        request = urllib.request.Request(f"{gateway.url}/v1/completions", body)
        with urllib.request.urlopen(request, timeout=60) as late:
            time.sleep(0.5)
            assert late.read() == faulty.FLOOD


def running(gateway: Server) -> dict[str, int]:
    return {name: up["running"] for name, up in upstreams(gateway).items()}


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_survive_the_death_of_an_upstream(
    gateway: Server, good: Server, folder: Path, sig: signal.Signals
) -> None:
    """Killed, or stopped: the same bytes come from the other, and no client learns of it."""
    prompts = [f"{sig} {i}" for i in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as pool:
        expected = list(pool.map(lambda p: text(good, p, 100), prompts))
    with simulated(folder, "--step", "30") as dying, behind(gateway, dying.url) as name:
        assert text(gateway, "warm") == text(good, "warm")
        with ThreadPoolExecutor(STREAMS) as pool:
            answers = [pool.submit(streamed, gateway, p, 100) for p in prompts]
            until(lambda: running(gateway)[name] >= STREAMS // 2)
            os.kill(dying.process.pid, sig)
            assert [a.result() for a in answers] == expected
        until(lambda: upstreams(gateway)[name]["state"] == "down")
        at_rest(gateway)
        os.kill(dying.process.pid, signal.SIGCONT)
        if sig == signal.SIGSTOP:
            until(lambda: upstreams(gateway)[name]["state"] == "up")
            assert [text(gateway, f"back {i}") for i in range(4)]
    until(lambda: gateway.metric("octavo_upstream_failovers_total") >= STREAMS // 2)


def test_streams_go_on_when_their_upstream_is_removed(
    gateway: Server, good: Server, folder: Path
) -> None:
    with simulated(folder, "--step", "30") as leaving:
        with behind(gateway, leaving.url) as name, ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(streamed, gateway, f"r{i}", 100) for i in range(4)]
            until(lambda: running(gateway)[name] >= 1)
            gateway.post("/v1/upstreams/remove", {"upstream": name}, ADMIN)
            assert name not in upstreams(gateway)
            assert [a.result() for a in answers] == [text(good, f"r{i}", 100) for i in range(4)]


def test_what_an_upstream_refuses_is_passed_on(gateway: Server, good: Server) -> None:
    status, body = gateway.post("/v1/completions", [], {})
    assert (status, body["error"]["message"]) == (400, "the body must be a JSON object")
    status, body = gateway.post("/v1/completions", {"model": "other", "prompt": "x"})
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    status, body = gateway.post("/v1/completions", {"model": "simulated", "max_tokens": "many"})
    assert status == 400


def test_admins_alone_see_upstreams(gateway: Server) -> None:
    assert gateway.get("/v1/upstreams", {})[0] == 401
    assert gateway.post("/v1/upstreams", {"upstream": "http://x:1"}, {})[0] == 401
    status, body = gateway.post("/v1/upstreams", {"upstream": "ftp://x"}, ADMIN)
    assert (status, body["error"]["param"]) == (400, "upstream")
    status, body = gateway.post("/v1/upstreams/drain", {"upstream": "nobody:1"}, ADMIN)
    assert status == 404 and "there are: 127.0.0.1:" in body["error"]["message"]


def test_a_drained_upstream_is_used_again(gateway: Server, folder: Path) -> None:
    with simulated(folder) as second, behind(gateway, second.url) as name:
        for action, state in (("drain", "draining"), ("resume", "up")):
            assert gateway.post(f"/v1/upstreams/{action}", {"upstream": name}, ADMIN)[0] == 200
            until(lambda state=state: upstreams(gateway)[name]["state"] == state)


def test_the_page_and_what_is_served(gateway: Server, folder: Path, good: Server) -> None:
    browser = ADMIN | {"accept": "text/html"}
    assert "<title>Octavo</title>" in gateway.get("/", browser)[1]
    paths = json.loads(gateway.get("/openapi.json", {})[1])["paths"]
    assert {"/v1/releases", "/v1/messages"} <= paths.keys() and "/v1/load_lora_adapter" not in paths
    text(gateway, "Hello", 4)
    recent = json.loads(gateway.get("/v1/requests", ADMIN)[1])["recent"]
    assert recent[0]["completion_tokens"] == 4
    assert gateway.get("/v1/requests", {})[0] == 401
    arguments = ("--upstream", good.url, "--no-ui")
    with serving(*arguments, log=folder / "bare.log", does="gateway") as bare:
        assert [bare.get(path, browser)[0] for path in ("/", "/ui/app.js")] == [404, 404]


def test_requests_wait_for_a_place_and_are_turned_away_in_time(folder: Path, good: Server) -> None:
    """One place, one that waits: the third gets 503 at once, with a time that is true."""
    arguments = ("--upstream", good.url, *QUICK, "--max-inflight", "1", "--max-queue", "1",
                 "--queue-timeout", "30")  # fmt: skip
    with serving(*arguments, log=folder / "full.log", does="gateway") as full:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(streamed, full, "one", 500)
            until(lambda: running(full)[good.url.partition("://")[2]] == 1)
            second = pool.submit(text, full, "two", 4)
            until(lambda: full.metric("octavo_gateway_waiting") == 1)
            status, body = full.post("/v1/completions", {"model": "simulated", "prompt": "three"})
            assert (status, body["error"]["code"]) == (503, "overloaded")
            assert not second.done()
            assert first.result() and second.result()
        assert full.stop() == 0


def test_upstreams_come_and_go_with_their_file(folder: Path, good: Server) -> None:
    file = folder / "upstreams"
    file.write_text(f"# nobody yet\n{good.url}/v1\n")
    arguments = ("--upstream-file", str(file), *QUICK)
    with serving(*arguments, log=folder / "file.log", does="gateway") as found:
        with simulated(folder) as second:
            file.write_text(f"{second.url}\n")
            name = second.url.partition("://")[2]
            until(lambda: list(upstreams(found)) == [name])
            assert text(found, "x") == text(good, "x")
            file.write_text("nonsense\n")
            time.sleep(1.2)
            assert list(upstreams(found)) == [name]


def test_requests_wait_for_an_upstream_that_is_not_there_yet(folder: Path, good: Server) -> None:
    server = Server("--admin-key", "admin", log=folder / "early.log", does="gateway")
    try:
        until(lambda: server.get("/health/live")[0] == 200)
        assert server.get("/health/ready")[0] == 503
        with ThreadPoolExecutor(1) as pool:
            early = pool.submit(text, server, "early")
            until(lambda: server.metric("octavo_gateway_waiting") == 1)
            server.post("/v1/upstreams", {"upstream": good.url}, ADMIN)
            assert early.result() == text(good, "early")
    finally:
        server.stop()


def test_fallbacks_answer_when_nobody_else_can_until_the_end(folder: Path, good: Server) -> None:
    """What runs when the gateway is told to end is finished; no process is left."""
    arguments = ("--upstream", f"http://127.0.0.1:{free_port()}", "--fallback", good.url, *QUICK)
    log = folder / "fallback.log"
    with serving(*arguments, log=log, does="gateway") as server, ThreadPoolExecutor(1) as pool:
        last = pool.submit(streamed, server, "end", 100)
        until(lambda: running(server)[good.url.partition("://")[2]] == 1)
        assert psutil.Process(server.process.pid).children() == []
        assert server.stop() == 0
        assert last.result() == text(good, "end", 100)
    assert "Traceback" not in log.read_text()


def test_the_client_library_reads_streams(gateway: Server, good: Server) -> None:
    asked = client(gateway).chat.completions
    messages: Any = [{"role": "user", "content": "hi"}]
    stream = asked.create(model="simulated", messages=messages, max_tokens=5, stream=True)
    said = "".join(c.choices[0].delta.content or "" for c in stream)
    whole = client(good).chat.completions.create(model="simulated", messages=messages, max_tokens=5)
    assert said == whole.choices[0].message.content
