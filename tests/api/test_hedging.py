"""A second upstream is asked when the first says nothing: real processes, a real client."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.balance.hedge import LEAST, Hedges
from tests.api import faulty
from tests.api.faulty import Faulty
from tests.api.server import Server, serving
from tests.api.test_gateway import (
    ADMIN,
    QUICK,
    at_rest,
    behind,
    simulated,
    streamed,
    text,
    upstreams,
)
from tests.waiting import until

HEDGE = 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hedging")


@pytest.fixture(scope="module")
def good(folder: Path) -> Iterator[Server]:
    with simulated(folder) as server:
        yield server


@pytest.fixture
def gateway(tmp_path: Path, good: Server) -> Iterator[Server]:
    arguments = ("--upstream", good.url, *QUICK, "--first-token-timeout", "20")
    log = tmp_path / "gateway.log"
    with serving(*arguments, "--hedge", str(HEDGE), log=log, does="gateway") as server:
        yield server


def waits(connection: socket.socket, one: Faulty) -> None:
    """Says nothing, until the client has left."""
    while connection.recv(65_536):
        pass
    one.left.set()


def test_who_answers_first_is_heard_and_the_other_is_told_to_stop(
    gateway: Server, good: Server
) -> None:
    with faulty.faulty(waits) as silent, behind(gateway, silent.url) as name:
        asked = 0
        for ask, posts in ((streamed, 1), (text, 2), (streamed, 3)):
            silent.left.clear()
            while silent.posts < posts:  # as it is in turns, every second one at least
                began, asked = time.monotonic(), asked + 1
                assert ask(gateway, f"h{asked}") == text(good, f"h{asked}")
            assert HEDGE <= time.monotonic() - began < 15
            assert silent.left.wait(5)
        assert asked <= 6 and silent.posts == 3
        until(lambda: gateway.metric("octavo_upstream_hedges_total", won="yes") == 3)
        assert upstreams(gateway)[name]["breaker"] == "closed"
        at_rest(gateway)


def test_a_second_that_fails_is_left_to_the_first(
    gateway: Server, good: Server, folder: Path
) -> None:
    def ask(prompt: str) -> None:
        body = {"model": "simulated", "prompt": prompt, "max_tokens": 12}
        session = {"x-session-id": "one"}  # which stays where it begins
        reply = gateway.post("/v1/completions", body, session)[1]
        assert reply["choices"][0]["text"] == text(good, prompt, 12)

    gateway.post("/v1/upstreams/remove", {"upstream": good.url}, ADMIN)
    with simulated(folder, "--step", "60") as slow, behind(gateway, slow.url):
        ask("s0")
        with faulty.faulty(faulty.page("502 Bad Gateway")) as bad, behind(gateway, bad.url):
            ask("s1")
            until(lambda: gateway.metric("octavo_upstream_hedges_total", won="no") == 1)
            assert bad.posts == 1
            at_rest(gateway)


def test_what_is_usual_is_measured() -> None:
    hedges = Hedges("p95")
    for i in range(LEAST - 1):
        hedges.seen("m", True, i / 100)
    assert hedges.seconds("m", True) is None
    hedges.seen("m", True, 9.0)
    assert hedges.seconds("m", True) == 9.0 and hedges.seconds("m", False) is None
    for i in range(400):
        hedges.seen("m", True, i / 100)
    assert hedges.seconds("m", True) == pytest.approx(3.87)
    assert Hedges(2.5).seconds("m", True) == 2.5 and Hedges().seconds("m", True) is None
