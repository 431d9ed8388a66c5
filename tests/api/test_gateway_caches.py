"""A gateway before a real engine knows what its prefix cache holds, also of what was evicted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.backends.base import BLOCK
from octavo.gateway.body import BLOCK_TOKENS
from tests.api.server import Server, serving
from tests.api.test_images import drawing, shown
from tests.waiting import until

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi".split()
OPENING = 30  # tokens that the template begins every prompt with, at most


@pytest.fixture(scope="module")
def small(smollm2: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose cache holds a few prompts."""
    log = tmp_path_factory.mktemp("caches") / "server.log"
    with serving("smollm2", "--context", "1024", "--memory", "290MiB", log=log) as server:
        yield server


@pytest.fixture
def gateway(small: Server, tmp_path: Path) -> Iterator[Server]:
    with serving("--upstream", small.url, log=tmp_path / "gateway.log", does="gateway") as server:
        until(lambda: tells(server))
        yield server


def tells(gateway: Server) -> bool:
    status, text = gateway.get("/v1/upstreams")
    return status == 200 and '"tells_cache":true' in text


def body(group: int, number: int = 0) -> dict[str, Any]:
    """Three quarters of the text are the same in a group."""
    shared = " ".join(random.Random(group).choices(WORDS, k=300))
    own = " ".join(random.Random(f"{group} {number}").choices(WORDS, k=100))
    content = f"{shared}, of these and the following words: {own}"
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": 1, "temperature": 0}


def guessed(gateway: Server, body: dict[str, Any]) -> float:
    """The share of a prompt that the gateway takes to be cached."""
    status, found = gateway.post("/v1/route/explain", body)
    assert status == 200, found
    (one,) = found["candidates"]
    return float(one["cost"]["cached"] / found["prompt_tokens"])


def found(server: Server, body: dict[str, Any], key: str = "") -> tuple[int, int]:
    """Tokens of a prompt, and those that were cached when it was asked."""
    headers = {"authorization": f"Bearer {key}"} if key else None
    status, reply = server.post("/v1/chat/completions", body, headers)
    assert status == 200, reply
    usage = reply["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_what_it_takes_to_be_cached_is(small: Server, gateway: Server) -> None:
    """More groups than fit, so that some are evicted: what is told to be held is, to a block."""
    status, text = small.get("/v1/models")
    assert status == 200
    groups = small.metric("octavo_kv_blocks") * BLOCK // 600 + 3
    draw, shares = random.Random(4), []
    for number in range(3 * int(groups)):
        asked = body(draw.randrange(int(groups)), number)
        guess = guessed(gateway, asked)
        tokens, cached = found(gateway, asked)
        shares.append(guess)
        # a gateway rounds down to blocks of its own, an engine to the token, and it knows the
        # template, which all prompts share
        most = BLOCK_TOKENS * 4 * tokens / len(str(asked["messages"])) + BLOCK + OPENING
        assert 0 <= cached - guess * tokens <= most, (number, guess, cached, tokens)
    assert min(shares) == 0 and max(shares) > 0.6, "some were evicted, and some were not"


def test_what_others_send_is_known_and_what_is_lost_is(
    small: Server, gateway: Server, tmp_path: Path
) -> None:
    """Another gateway knows it, also one that comes later; what has no name nobody knows."""
    found(small, body(1000))
    found(gateway, body(1001))
    with serving("--upstream", small.url, log=tmp_path / "other.log", does="gateway") as other:
        for each in (gateway, other):
            until(lambda: guessed(each, body(1001)) > 0.9)  # noqa: B023
            assert guessed(each, body(1000)) == 0
        found(other, body(1002))
        until(lambda: guessed(gateway, body(1002)) > 0.9)
    small.engine().kill()
    until(lambda: guessed(gateway, body(1002)) == 0)
    until(lambda: small.get("/health/ready")[0] == 200)
    found(gateway, body(1001))
    until(lambda: guessed(gateway, body(1001)) > 0.9)


def test_a_server_does_not_wait_for_who_listens(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with serving("smollm2", "--context", "256", "--drain-timeout", "60", log=log) as server:
        arguments = ("--upstream", server.url)
        with serving(*arguments, log=tmp_path / "gateway.log", does="gateway") as gateway:
            until(lambda: tells(gateway))
            assert server.stop() == 0  # which waits for 40 s
            until(lambda: not tells(gateway))


def test_only_admins_are_told(tmp_path: Path) -> None:
    """With another key a gateway goes by what it has sent."""
    log = tmp_path / "server.log"
    keys = ("--api-key", "one", "--admin-key", "two")
    with serving("smollm2", "--context", "256", *keys, log=log) as server:
        bearer = {"authorization": "Bearer one"}
        assert server.get("/v1/cache/events", bearer)[0] == 403
        asked = body(1) | {"messages": [{"role": "user", "content": "word " * 150}]}
        for key, listens in (("one", False), ("two", True)):
            arguments = ("--upstream", server.url, "--upstream-key", key)
            log = tmp_path / f"{key}.log"
            with serving(*arguments, log=log, does="gateway") as gateway:
                found(gateway, asked)
                until(lambda: guessed(gateway, asked) > 0.5)
                until(lambda: tells(gateway) == listens)  # noqa: B023


@pytest.mark.parametrize("key", ["one", "two"])
def test_keys_of_a_gateway_share_nothing_that_is_cached(tmp_path: Path, key: str) -> None:
    """The server gets all of it under one key; what it tells goes by prompts of each."""
    keys = ("--api-key", "one", "--admin-key", "two")
    with serving("smollm2", "--context", "1024", *keys, log=tmp_path / "server.log") as server:
        arguments = ("--upstream", server.url, "--upstream-key", key)
        own = ("--api-key", "a", "--api-key", "b")
        with serving(*arguments, *own, log=tmp_path / "gateway.log", does="gateway") as gateway:
            until(lambda: found(gateway, body(0), "a")[1] > 0)
            assert found(gateway, body(0), "b")[1] == 0
            tokens, cached = found(gateway, body(0), "b")
            assert cached > 0.9 * tokens
            assert found(server, body(0), key)[1] == 0


def test_simulated_engines_tell_it_too(tmp_path: Path) -> None:
    """The cache has room for one prompt: the second evicts the first."""
    arguments = ("--cache", "720", "--prefill", "1000000")
    with serving(*arguments, log=tmp_path / "simulated.log", does="simulate") as simulated:
        upstream = ("--upstream", simulated.url)
        with serving(*upstream, log=tmp_path / "gateway.log", does="gateway") as gateway:
            until(lambda: tells(gateway))
            for one, other in ((1, 2), (2, 1)):
                status, _ = gateway.post("/v1/chat/completions", body(one))
                assert status == 200
                until(lambda: guessed(gateway, body(one)) > 0.9)  # noqa: B023
                until(lambda: guessed(gateway, body(other)) < 0.5)  # noqa: B023


def test_requests_go_where_their_images_are_encoded(tmp_path: Path) -> None:
    """What it takes elsewhere is known of the engines, and where of what they were sent."""
    images = [drawing(("circle", color, (60, 40, 140, 120))) for color in ("red", "blue")]

    def about(image: bytes, text: str) -> dict[str, Any]:
        return {"messages": shown(image, text=text), "max_tokens": 1}

    def costs(gateway: Server, image: bytes) -> list[float]:
        status, found = gateway.post("/v1/route/explain", about(image, "What is it?"))
        assert status == 200, found
        by_name = sorted(found["candidates"], key=lambda one: servers.index(one["replica"]))
        return [one["cost"]["images"] for one in by_name]

    with (
        serving("tiny-vlm", "--offline", log=tmp_path / "a.log") as a,
        serving("tiny-vlm", "--offline", log=tmp_path / "b.log") as b,
        serving(
            "--upstream", a.url, "--upstream", b.url, log=tmp_path / "g.log", does="gateway"
        ) as gateway,
    ):
        servers = [one.url.partition("://")[2] for one in (a, b)]
        for number, (image, other) in enumerate(zip(images, reversed(servers), strict=True)):
            assert gateway.post("/v1/upstreams/drain", {"upstream": other})[0] == 200
            found(gateway, about(image, f"What color is the circle of drawing {number}?"))
            assert gateway.post("/v1/upstreams/resume", {"upstream": other})[0] == 200
            until(lambda: gateway.get("/v1/upstreams")[1].count('"state":"up"') == 2)
        until(lambda: min(costs(gateway, drawing())) > 0)
        for at, image in enumerate(images):
            there, elsewhere = costs(gateway, image)[at], costs(gateway, image)[1 - at]
            assert there == 0 < elsewhere
