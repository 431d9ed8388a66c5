"""Faults that docs/gateway.md has a table of, before real processes: what is lost, what is wrong."""

from __future__ import annotations

import json
import random
import signal
import socket
import struct
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.api import faulty
from tests.api.server import Server, serving
from tests.api.test_gateway import (
    ADMIN,
    QUICK,
    at_rest,
    behind,
    running,
    simulated,
    streamed,
    text,
    upstreams,
)
from tests.waiting import until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def good(folder: Path) -> Iterator[Server]:
    with simulated(folder) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(folder: Path, good: Server) -> Iterator[Server]:
    arguments = ("--upstream", good.url, *QUICK)
    with serving(*arguments, log=folder / "gateway.log", does="gateway") as server:
        yield server


def name(server: Server) -> str:
    return server.url.partition("://")[2]


@pytest.mark.parametrize(
    ("spoil", "size"),
    [(faulty.resets, 65536), (faulty.closes, 65536), (faulty.says_nothing, 65536),
     (faulty.no_frame, 65536), (faulty.no_event, 65536), (faulty.resets, 1)],
    ids=["reset", "cut", "silence", "no-frame", "no-event", "single-bytes"],
)  # fmt: skip
def test_a_stream_that_an_upstream_spoils_goes_on(
    gateway: Server, good: Server, spoil: faulty.Behaviour, size: int
) -> None:
    """After 40 of 60 tokens; whoever takes over, the text is one."""
    before = gateway.metric("octavo_upstream_failovers_total")
    fault = faulty.proxy(good.port, 40, spoil, size)
    with faulty.faulty(fault, owner="octavo") as bad, behind(gateway, bad.url):
        expected = [text(good, f"spoilt {i}", 60) for i in range(2)]
        assert [streamed(gateway, f"spoilt {i}", 60) for i in range(2)] == expected
        assert bad.posts >= 1
    until(lambda: gateway.metric("octavo_upstream_failovers_total") > before)
    at_rest(gateway)


def test_streams_of_the_only_upstream_wait_for_the_next(
    gateway: Server, good: Server, folder: Path
) -> None:
    """Killed; its successor begins only then, elsewhere."""
    expected = [text(good, f"only {i}", 60) for i in range(4)]
    with simulated(folder, "--step", "30") as only, behind(gateway, only.url) as first:
        gateway.post("/v1/upstreams/drain", {"upstream": name(good)}, ADMIN)
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(streamed, gateway, f"only {i}", 60) for i in range(4)]
            until(lambda: running(gateway)[first] == 4)
            only.stop(signal.SIGKILL)
            until(lambda: upstreams(gateway)[first]["state"] == "down")
            gateway.post("/v1/upstreams", {"upstream": good.url}, ADMIN)
            assert [answer.result() for answer in answers] == expected


def test_a_killed_gateway_leaves_nothing_running(good: Server, folder: Path) -> None:
    """Its open streams are lost, and only they: upstreams stop, and the next one serves."""
    arguments = ("--upstream", good.url, *QUICK)
    with serving(*arguments, log=folder / "killed.log", does="gateway") as killed:
        with ThreadPoolExecutor(16) as pool:
            asked = [pool.submit(streamed, killed, f"killed {i}", 2000) for i in range(16)]
            until(lambda: running(killed)[name(good)] == 16)
            killed.stop(signal.SIGKILL)
            for answer in asked:
                assert answer.exception() is not None  # and no text that looks whole
        began = time.monotonic()
        until(lambda: json.loads(good.get("/health")[1])["running"] == 0)
        assert time.monotonic() - began < 5
    with serving(*arguments, log=folder / "next.log", does="gateway") as following:
        assert streamed(following, "next") == text(good, "next")


def test_clients_that_vanish_hold_nothing(gateway: Server, good: Server) -> None:
    """By FIN or RST, before and within their streams; one that stays has its text."""
    body = json.dumps({"model": "simulated", "prompt": "x", "max_tokens": 400, "stream": True})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    drawn = random.Random(1)

    def vanish(number: int) -> None:
        with socket.create_connection(("127.0.0.1", gateway.port)) as leaving:
            leaving.sendall((head + body).encode())
            for _ in range(drawn.randrange(4)):
                leaving.recv(200)
            if number % 2:
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with ThreadPoolExecutor(20) as pool:
        staying = pool.submit(streamed, gateway, "stays", 200)
        list(pool.map(vanish, range(60)))
        assert staying.result() == text(good, "stays", 200)
    at_rest(gateway)
    until(lambda: json.loads(good.get("/health")[1])["running"] == 0)


def test_a_client_that_vanishes_within_its_body_is_no_failure(gateway: Server) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port)) as leaving:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        leaving.sendall(head + b"content-length: 1000\r\n\r\n{")
    counted = 'octavo_requests_total{route="/v1/chat/completions",status="499"} 1.0'
    until(lambda: counted in gateway.get("/metrics")[1])


def test_what_is_refused_is_not_counted_as_answered(good: Server, folder: Path) -> None:
    """One place, which is taken, a line of one: nobody knows how long that takes."""
    arguments = ("--upstream", good.url, *QUICK, "--max-inflight", "1", "--max-queue", "1")
    with serving(*arguments, log=folder / "refused.log", does="gateway") as full, ThreadPoolExecutor(2) as pool:  # fmt: skip
        asked = [pool.submit(streamed, full, "long", 200) for _ in range(2)]
        until(lambda: full.metric("octavo_gateway_waiting") == 1)
        for _ in range(40):
            body = json.dumps({"model": "simulated", "prompt": "x"}).encode()
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"{full.url}/v1/completions", body, timeout=60)
            with refused.value as reply:
                assert (reply.code, reply.headers["retry-after-ms"]) == (503, "1000")
        assert {answer.result() for answer in asked} == {text(good, "long", 200)}
        at_rest(full)


def test_what_is_too_much_is_refused_with_a_time(good: Server, folder: Path) -> None:
    """80 at once, 4 places, a line of 16: who is let in has the right text, all others get 503."""
    arguments = ("--upstream", good.url, *QUICK, "--max-inflight", "4", "--max-queue", "16")
    with serving(*arguments, log=folder / "much.log", does="gateway") as full:

        def ask(number: int) -> tuple[int, str]:
            body = {"model": "simulated", "prompt": f"much {number % 4}", "max_tokens": 40}
            url = f"{full.url}/v1/completions"
            try:
                with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=60) as reply:
                    return 200, json.loads(reply.read())["choices"][0]["text"]
            except urllib.error.HTTPError as e:
                with e:
                    assert float(e.headers["retry-after-ms"]) >= 500
                    return e.code, ""

        expected = {text(good, f"much {number}", 40) for number in range(4)}
        with ThreadPoolExecutor(80) as pool:
            found = list(pool.map(ask, range(80)))
        counted = Counter(status for status, _ in found)
        assert counted[200] >= 20 and counted[503] >= 20 and counted.total() == 80
        assert set(counted) == {200, 503}
        assert {said for status, said in found if status == 200} <= expected
        at_rest(full)
