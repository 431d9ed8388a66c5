"""What prefix caches hold, from engines to a stream, and what a gateway makes of it."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.balance.chain import text_chain
from octavo.balance.cost import Ask
from octavo.balance.prefix_index import ReplicaPrefixes
from octavo.client.base import EngineClient
from octavo.client.cached_prompts import CachedPrompts
from octavo.engine.block_changes import CachedPrompt
from octavo.engine.request import SamplingParams
from octavo.gateway import upstream_cache
from octavo.gateway.cache_subscriptions import MOST_HELD
from octavo.gateway.prompt_names import NAMED, NamedPrompt, name_prompt
from octavo.gateway.upstream import DEFAULT, ModelFigures, Place
from octavo.gateway.upstream_cache import UpstreamCache
from octavo.gateway.upstreams import Upstreams
from octavo.generate.choices import LONGER, _requests
from octavo.generate.model import ServedModel
from octavo.generate.prepare import PreparedRequest
from octavo.server.cache_events import (
    AT_ONCE,
    MOST_NAME,
    PROMPT_NAME,
    CacheEvent,
    CacheFeed,
    caches_of,
    prompt_name,
)
from octavo.server.registry import Registry

# -- at a server ------------------------------------------------------------------------------


@dataclass
class Engines:
    """An engine client that has nothing but caches."""

    caches: list[CachedPrompts] = field(default_factory=lambda: [CachedPrompts(), CachedPrompts()])
    adapters: tuple[str, ...] = ()


def prompt(name: str, cached: int, last: bool = False) -> CachedPrompt:
    return CachedPrompt(name, 100, cached, last)


def told(feed: CacheFeed) -> dict[str, tuple[int, bool]]:
    feed.follow()
    return {one.name: (one.cached, one.last) for one in feed.take()}


def test_a_feed_tells_all_and_then_what_changes() -> None:
    registry, client = Registry(), Engines()
    first, second = client.caches
    first.take([prompt("a", 32), prompt("b", 16)])
    registry.add("m", cast(EngineClient, client))
    feed = CacheFeed(partial(caches_of, registry))
    assert told(feed) == {"a": (32, False), "b": (16, False)}
    assert told(feed) == {}
    first.take([prompt("a", 16), prompt("b", 0, last=True)])
    assert told(feed) == {"a": (16, False), "b": (0, True)}
    first.take([prompt("a", 48), prompt("a", 64)])
    assert told(feed) == {"a": (64, False)}, "the latest counts"
    assert told(CacheFeed(partial(caches_of, registry))) == {"a": (64, False)}, (
        "another begins with what is held"
    )
    feed.close()
    first.take([prompt("a", 0, last=True)])
    assert not list(feed.take()), "nobody is listened to"


def test_the_engine_that_holds_the_most_of_a_prompt_counts() -> None:
    registry, client = Registry(), Engines()
    first, second = client.caches
    registry.add("m", cast(EngineClient, client))
    feed = CacheFeed(partial(caches_of, registry))
    first.take([prompt("a", 32)])
    second.take([prompt("a", 64)])
    assert told(feed) == {"a": (64, False)}
    second.clear()
    assert told(feed) == {"a": (32, False)}, "the other one holds as much as before"
    first.clear()
    assert told(feed) == {"a": (0, True)}


def test_what_is_unloaded_holds_nothing() -> None:
    registry, client = Registry(), Engines()
    registry.add("m", cast(EngineClient, client))
    feed = CacheFeed(partial(caches_of, registry))
    client.caches[0].take([prompt("a", 32)])
    assert told(feed) == {"a": (32, False)}
    registry.remove("m")
    assert told(feed) == {"a": (0, True)}
    assert not client.caches[0].listeners


def test_who_waits_hears_at_once() -> None:
    async def run() -> None:
        registry, client = Registry(), Engines()
        registry.add("m", cast(EngineClient, client))
        feed = CacheFeed(partial(caches_of, registry))
        assert told(feed) == {}
        waiting = asyncio.create_task(feed.wait())
        await asyncio.sleep(0)
        client.caches[1].take([])
        await asyncio.sleep(0)
        assert not waiting.done()
        client.caches[1].take([prompt("a", 32)])
        async with asyncio.timeout(0.2):  # before it would look anyhow
            await waiting

    asyncio.run(run())


def test_events_are_no_longer_than_gateways_read() -> None:
    largest = CacheEvent([CachedPrompt("x" * MOST_NAME, 10**9, 10**9, False)] * AT_ONCE)
    assert len(msgspec.json.encode(largest)) < MOST_HELD


@pytest.mark.parametrize(
    ("prompts", "longer", "named"),
    [([[1] * 10], 10, True), ([[1] * 10], 11, False), ([[1] * 10] * 2, 0, False)],
)
def test_names_are_of_one_prompt_and_not_much_longer(
    prompts: list[list[int]], longer: int, named: bool
) -> None:
    name, params = "x" * (LONGER + longer), SamplingParams()
    model = cast(ServedModel, SimpleNamespace(adapter=""))
    job = PreparedRequest(
        model=model, prompts=prompts, params=params, n=2, made=2, prompt_name=name
    )
    assert {one.prompt_name for one in _requests(job, params)} == {name if named else ""}


# -- at a gateway -----------------------------------------------------------------------------

A = tuple(range(8))  # blocks of a prompt
B = (*A[:4], 100, 101)  # of one that begins as that does


def ask(blocks: tuple[int, ...] = A) -> Ask:
    return Ask(128 * len(blocks), blocks, 128)


def held_of(blocks: tuple[int, ...], cached: float, last: bool = False) -> CachedPrompt:
    """A share of a prompt of 1,600 tokens is held."""
    return CachedPrompt(name_prompt("m", blocks), 1600, int(1600 * cached), last)


class Told:
    """A cache that tells, and an index of what it holds."""

    def __init__(self) -> None:
        self.cache, self.index = UpstreamCache("up"), ReplicaPrefixes()
        self.cache.listen({"m": self.index})

    def told(self, *prompts: CachedPrompt) -> None:
        self.cache.told(prompts, {"m": self.index})

    def held(self, blocks: tuple[int, ...] = A) -> int:
        return self.index.match(blocks).blocks("up")


@given(
    st.text(max_size=20), st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=800)
)
def test_names_say_what_they_are_of(model: str, blocks: list[int]) -> None:
    name = name_prompt(model, blocks)
    assert NamedPrompt.of(name) == NamedPrompt(model, len(blocks), tuple(blocks[:NAMED]))
    assert name.isascii() and prompt_name({PROMPT_NAME: name}) == name


def test_what_has_no_name() -> None:
    assert name_prompt("m", ()) == "" and name_prompt("m" * 500, A) == ""
    assert prompt_name({}) == "" and prompt_name({PROMPT_NAME: "x" * 9000}) == ""
    long = NamedPrompt.of(name_prompt("m", range(2 * NAMED)))
    assert long.held(CachedPrompt("", 1000, 100, False)) == NAMED // 5
    assert long.held(CachedPrompt("", 1000, 900, False)) == NAMED, "of more nothing is known"


@pytest.mark.parametrize(
    "name", ["", "a", "m.8", "m.8.?", "m.x.AAAAAAAAAAA=", "m.8.AAAA", "m.8.AAAAAAAAAAA", "\0.\0.\0"]
)
def test_names_of_others_are_no_news(name: str) -> None:
    one = Told()
    one.told(CachedPrompt(name, 1600, 1600, False), held_of(A, 0.5))
    assert one.held() == 4 and len(one.index) == 4


def test_a_prompt_is_held_while_it_is_answered_and_as_told_from_then_on() -> None:
    one = Told()
    sent = one.cache.begin(one.index, ask())
    assert one.held() == 8
    one.told(held_of(A, 0.5))
    assert one.held() == 8, "the rest is being computed"
    one.cache.end(sent)
    assert one.held() == 4
    one.told(held_of(A, 0.98))
    assert one.held() == 7
    one.told(held_of(A, 0.991))
    assert one.held() == 8, "no whole block is missing"
    one.told(held_of(A, 0.5))
    assert one.held() == 4
    one.told(held_of(A, 0, last=True))
    assert (one.held(), len(one.index)) == (0, 0)


def test_a_request_that_was_refused_leaves_nothing() -> None:
    one = Told()
    one.cache.end(one.cache.begin(one.index, ask()))
    assert len(one.index) == 0
    silent, assumed = UpstreamCache("up"), ReplicaPrefixes()
    silent.end(silent.begin(assumed, ask()))
    assert assumed.match(A).blocks("up") == 8, "who tells nothing may hold it"


def test_shared_blocks_stay_until_the_last_prompt_is_gone() -> None:
    one = Told()
    one.told(held_of(A, 1), held_of(B, 1))
    assert one.held(B) == 6
    one.told(held_of(B, 0.6, last=True))  # whose own blocks are gone
    assert one.held() == 8 and one.held(B) == 4
    one.told(held_of(A, 0.4))
    assert one.held() == 3


def test_it_does_not_matter_who_has_sent_a_prompt() -> None:
    """Another process makes the same numbers of a text."""
    text = "The sea is large. " * 200
    code = f"from octavo.balance.chain import text_chain; print(text_chain({text.encode()!r}, 512))"
    environ = os.environ | {"PYTHONHASHSEED": "5"}
    made = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, check=True
    )
    blocks = text_chain(text.encode(), 512)
    assert made.stdout.decode() == f"{blocks}\n" and len(blocks) == 7


def test_who_is_listened_to_again_holds_what_it_tells_now() -> None:
    one = Told()
    one.told(held_of(A, 1))
    one.cache.tells = False
    one.cache.end(one.cache.begin(one.index, ask(B)))
    assert one.held(B) == 6, "as was sent"
    one.cache.listen({"m": one.index})
    assert len(one.index) == 0
    one.told(held_of(B, 0.5))
    assert one.held() == 3
    one.told(held_of(A, 0, last=True))
    assert one.held() == 3, "which was forgotten before"


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an upstream says: what it told first is forgotten first."""
    monkeypatch.setattr(upstream_cache, "MOST_TOLD", 20)
    one = Told()
    prompts = [tuple(range(10 * i, 10 * i + 8)) for i in range(50)]
    one.told(*(held_of(blocks, 1) for blocks in prompts))
    assert len(one.index) == 16 and one.held(prompts[48]) == one.held(prompts[49]) == 8
    one.told(held_of(prompts[48], 0.5))
    assert one.held(prompts[48]) == 4, "one that shrinks is not forgotten"
    one.told(held_of(prompts[0], 0, last=True), held_of(prompts[7], 1))
    assert one.held(prompts[7]) == 8 and len(one.index) == 20
    one.told(*(held_of(blocks, 0, last=True) for blocks in prompts))
    assert len(one.index) == 0


def test_a_request_from_before_takes_nothing_of_what_is_told_now() -> None:
    one = Told()
    sent = one.cache.begin(one.index, ask())
    one.told(held_of(A, 1))
    one.cache.listen({"m": one.index})
    one.told(held_of(A, 1))
    one.cache.end(sent)
    assert one.held() == 8
    one.told(held_of(A, 0, last=True))
    assert len(one.index) == 0


def moved(upstreams: Upstreams) -> None:
    upstreams.add(Place("http://a", "another"))


def another_policy(upstreams: Upstreams) -> None:
    upstreams.configure("least-load", 256)


def another_model(upstreams: Upstreams) -> None:
    (up,) = upstreams
    upstreams.up(up, {"m": ModelFigures(), "n": ModelFigures()}, True)


def gone_and_back(upstreams: Upstreams) -> None:
    (up,) = upstreams
    upstreams.down(up, "gone")
    upstreams.up(up, {"m": ModelFigures()}, True)


@pytest.mark.parametrize("change", [moved, another_policy, another_model, gone_and_back])
def test_who_tells_is_to_begin_anew_once_an_index_has_forgotten_it(
    change: Callable[[Upstreams], None],
) -> None:
    upstreams, asked = Upstreams(), list[str]()
    up = upstreams.add(Place("http://a"))
    upstreams.up(up, {"m": ModelFigures()}, True)
    up.cache.outdated = lambda: asked.append("again")
    upstreams.listen(up)
    upstreams.told(up, [held_of(A, 1)])
    upstreams.up(up, {"m": ModelFigures()}, True)  # as every probe says
    assert asked == []
    change(upstreams)
    assert asked == ["again"]
    up.cache.ignore()
    change(upstreams)
    assert asked == ["again"], "nobody listens"


def test_an_engine_and_its_gateway_agree() -> None:
    """Whatever is told, in whatever order, prompts hold what was told of them last."""
    rng, one = random.Random(2), Told()
    latest: dict[tuple[int, ...], int] = {}
    for i in range(300):
        blocks = tuple(range(rng.randrange(1, 9))) + ((100 + i,) if rng.random() < 0.5 else ())
        latest.setdefault(blocks, 0)
        for some in rng.sample(sorted(latest), min(len(latest), 3)):
            count, last = rng.randrange(len(some) + 1), rng.random() < 0.3
            one.told(CachedPrompt(name_prompt("m", some), 16 * len(some), 16 * count, last))
            latest[some] = count
            if last:
                del latest[some]
        known = {block for blocks, count in latest.items() for block in blocks[:count]}
        assert len(one.index) == len(known) and all(one.held((block,)) for block in known)


def test_upstreams_hear_it_by_model() -> None:
    upstreams = Upstreams()
    up = upstreams.add(Place("http://a"))
    upstreams.up(up, {"m": ModelFigures(), "n": ModelFigures()}, True)
    for model in ("m", "n"):
        lease = upstreams.choose(DEFAULT, model, ask()).lease
        assert lease is not None
        lease.end(True)

    def cached(model: str) -> int:
        (one,) = upstreams.explain(DEFAULT, model, ask())
        return one.cost.cached

    assert (cached("m"), cached("n")) == (1023, 1023), "all but the last token, as it was sent"
    upstreams.listen(up)
    assert (cached("m"), cached("n")) == (0, 0)
    lease = upstreams.choose(DEFAULT, "n", ask()).lease
    assert lease is not None and (cached("m"), cached("n")) == (0, 1023)
    lease.end()
    other = CachedPrompt(name_prompt("another", A), 1600, 1600, False)
    upstreams.told(up, [held_of(A, 0.5), other])
    assert (cached("m"), cached("n")) == (512, 0)
