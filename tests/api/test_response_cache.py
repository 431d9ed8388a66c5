"""Answers that are kept: real processes, and what they were asked."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from octavo.gateway.response_cache import (
    FOLLOWED,
    OVERHEAD,
    SECONDS,
    ResponseCache,
    deterministic,
)
from tests.api import faulty
from tests.api.server import Server, serving
from tests.api.test_gateway import ADMIN, QUICK, at_rest, behind, simulated, upstreams
from tests.waiting import until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def good(folder: Path) -> Iterator[Server]:
    with simulated(folder) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(folder: Path, good: Server) -> Iterator[Server]:
    arguments = ("--upstream", good.url, *QUICK[:-2], "--response-cache", "1000000")  # no keys
    with serving(*arguments, log=folder / "gateway.log", does="gateway") as server:
        yield server


def ask(server: Server, key: str = "", **fields: Any) -> tuple[str | None, bytes]:
    """What the answer says of the cache, and all of its bytes."""
    body = {"model": "simulated", "prompt": "x", "max_tokens": 8} | fields
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)  # fmt: skip
    with urllib.request.urlopen(request, timeout=30) as response:
        return response.headers["x-cache"], response.read()


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"seed": 3}, {"temperature": 0.0, "stream": True}])  # fmt: skip
def test_the_same_answer_is_given_again(gateway: Server, fields: dict[str, Any]) -> None:
    first, body = ask(gateway, **fields)
    assert first is None and ask(gateway, **fields) == ("hit", body)
    assert ask(gateway, prompt="y", **fields)[0] is None
    assert ask(gateway, key="another", **fields)[0] is None  # whom the upstream may refuse


def test_what_may_be_answered_otherwise_is_not_kept(gateway: Server) -> None:
    for fields in ({}, {"temperature": 0.5}, {"seed": None}):
        assert [ask(gateway, **fields)[0] for _ in range(2)] == [None, None]


def test_one_is_computed_for_all_who_ask_at_once(gateway: Server, good: Server) -> None:
    before = gateway.metric("octavo_upstream_requests_total")
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, gateway, prompt="all", temperature=0, max_tokens=60) for _ in range(8)]  # fmt: skip
        answers = [one.result() for one in asked]
    assert sorted(str(hit) for hit, _ in answers) == ["None"] + ["hit"] * 7
    assert len({body for _, body in answers}) == 1
    until(lambda: gateway.metric("octavo_response_cache_total", result="hit") >= 7)
    until(lambda: gateway.metric("octavo_upstream_requests_total") == before + 1)
    assert gateway.metric("octavo_response_cache_bytes") > len(answers[0][1])


def test_broken_streams_and_errors_are_not_kept(gateway: Server, good: Server) -> None:
    gateway.post("/v1/upstreams/remove", {"upstream": good.url}, ADMIN)
    with faulty.faulty(faulty.breaks_off) as bad, behind(gateway, bad.url):
        for posts in (1, 2):
            hit, body = ask(gateway, prompt="broken", temperature=0, stream=True)
            assert hit is None and b"ended in the middle" in body
            assert bad.posts == posts
        at_rest(gateway)
    assert gateway.post("/v1/upstreams", {"upstream": good.url}, ADMIN)[0] == 200


def test_a_stream_that_says_that_it_failed_is_not_kept(gateway: Server, good: Server) -> None:
    """Though it has the end of a good one. Its upstream is not asked for ever."""
    gateway.post("/v1/upstreams/remove", {"upstream": good.url}, ADMIN)
    with faulty.faulty(faulty.says_that_it_failed) as bad, behind(gateway, bad.url) as name:
        for posts in range(1, 6):
            hit, body = ask(gateway, prompt="failed", temperature=0, stream=True)
            assert hit is None and body.endswith(b"data: [DONE]\n\n")
            assert bad.posts == posts
        assert upstreams(gateway)[name]["breaker"] != "closed"
        at_rest(gateway)
    assert gateway.post("/v1/upstreams", {"upstream": good.url}, ADMIN)[0] == 200


def test_nobody_waits_long_for_the_request_of_another(gateway: Server, good: Server) -> None:
    """Which goes on and on; theirs are answered, and not kept."""

    def first_goes_on(connection: socket.socket, one: faulty.Faulty) -> None:
        if one.posts == 1:
            return faulty.goes_on_and_on(connection, one)
        connection.sendall(faulty.SSE + faulty.chunk(" one") + b"data: [DONE]\n\n")

    gateway.post("/v1/upstreams/remove", {"upstream": good.url}, ADMIN)
    same = {"prompt": "the same", "temperature": 0, "stream": True}
    with ThreadPoolExecutor(3) as pool:
        with faulty.faulty(first_goes_on) as bad, behind(gateway, bad.url):
            leader = pool.submit(ask, gateway, **same)
            until(lambda: bad.posts == 1)
            began = time.monotonic()
            answers = [one.result(30) for one in [pool.submit(ask, gateway, **same) for _ in range(2)]]  # fmt: skip
            assert FOLLOWED <= time.monotonic() - began < FOLLOWED + 20 and not leader.done()
            assert [hit for hit, _ in answers] == [None, None] and bad.posts == 3
        assert b"data: [DONE]" not in leader.result()[1]
    at_rest(gateway)
    assert gateway.post("/v1/upstreams", {"upstream": good.url}, ADMIN)[0] == 200


def test_nothing_is_kept_over_a_change_of_the_pools(folder: Path) -> None:
    """Not even what was on its way, and not if the first upstream comes back."""

    def answering(text: str) -> faulty.Behaviour:
        def answer(connection: socket.socket, one: faulty.Faulty) -> None:
            if b"slow" in one.own.asked:
                go_on.wait(10)
            connection.sendall(faulty.SSE + faulty.chunk(text) + b"data: [DONE]\n\n")

        return answer

    def put(one: faulty.Faulty, **more: Any) -> None:
        config = {"pools": {"default": {"upstreams": [one.url]}}, "probe_interval": 0.1, "response_cache": 10**6}  # fmt: skip
        assert gateway.post("/v1/gateway/config", config | more, ADMIN)[0] == 200
        up = one.url.partition("://")[2]
        until(lambda: upstreams(gateway).get(up, {}).get("state") == "up")

    def asked(prompt: str = "pools") -> tuple[bool, bool]:
        hit, body = ask(gateway, prompt=prompt, temperature=0, stream=True)
        return hit == "hit", b"old" in body

    go_on = threading.Event()
    with (
        faulty.faulty(answering("old")) as old, faulty.faulty(answering("new")) as new,
        serving("--upstream", old.url, log=folder / "pools.log", does="gateway") as gateway,
        ThreadPoolExecutor(1) as pool,
    ):  # fmt: skip
        put(old)
        assert [asked(), asked()] == [(False, True), (True, True)]
        put(old, max_queue=9)
        assert asked() == (True, True)
        late = pool.submit(asked, "slow")
        until(lambda: old.posts == 2)
        put(new)
        assert asked() == (False, False)
        go_on.set()
        assert late.result() == (False, True)
        assert [asked("slow"), asked("slow")] == [(False, False), (True, False)]
        put(old)
        assert asked() == (False, True)


def test_bytes_are_bounded_and_the_latest_stay() -> None:
    now = [0.0]
    cache = ResponseCache(4000, lambda: now[0])
    for name in (b"a", b"b", b"c", b"d"):
        cache.put(name, bytes(900 - OVERHEAD), {})
    assert cache.take(b"a") is not None and cache.size == 3600
    cache.put(b"e", bytes(900 - OVERHEAD), {})
    assert cache.take(b"b") is None and cache.take(b"a") is not None
    cache.put(b"large", bytes(1001), {})
    assert cache.take(b"large") is None and cache.size == 3600
    cache.limit = 1000
    assert cache.size == 900 and cache.take(b"a") is not None
    now[0] = SECONDS + 1
    assert cache.take(b"a") is None and cache.size == 0


@pytest.mark.parametrize(
    ("body", "kept"),
    [(b'{"temperature":0}', True), (b'{"temperature":0.00}', True), (b'{"seed":0}', True),
     (b'{"seed":-1}', False), (b'{"seed":4294967295}', False), (b'{"seed":1.5}', False),
     (b'{"temperature":0,"seed":-1}', True), (b'{"seed":9007199254740993}', True),
     (b'{"temperature":null,"seed":null}', False), (b'{"temperature":"0"}', False), (b"{}", False)],
)  # fmt: skip
def test_which_requests_are_deterministic(body: bytes, kept: bool) -> None:
    assert deterministic(body) == kept
