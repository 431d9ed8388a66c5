"""What prefix caches hold, from engines to a stream, and what a gateway makes of it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import pytest

from octavo.balance.cost import Ask
from octavo.balance.prefix_index import ReplicaPrefixes
from octavo.client.base import EngineClient
from octavo.client.cached_prompts import CachedPrompts
from octavo.engine.block_changes import CachedPrompt
from octavo.gateway import upstream_cache
from octavo.gateway.upstream import DEFAULT, Place
from octavo.gateway.upstream_cache import UpstreamCache
from octavo.gateway.upstreams import Upstreams
from octavo.server.cache_events import CacheFeed, caches_of
from octavo.server.registry import Registry

# -- at a server ------------------------------------------------------------------------------


@dataclass
class Engines:
    """An engine client that has nothing but caches."""

    caches: list[CachedPrompts] = field(default_factory=lambda: [CachedPrompts(), CachedPrompts()])
    adapters: tuple[str, ...] = ()


def prompt(id: str, cached: int, last: bool = False) -> CachedPrompt:
    return CachedPrompt(id, 100, cached, last)


def told(feed: CacheFeed) -> dict[str, tuple[int, bool]]:
    feed.follow()
    return {one.id: (one.cached, one.last) for one in feed.take()}


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


# -- at a gateway -----------------------------------------------------------------------------

BLOCKS = tuple(range(8))  # of a prompt of 1,024 tokens


def ask(id: str, blocks: tuple[int, ...] = BLOCKS) -> Ask:
    return Ask(128 * len(blocks), blocks, 128, id=id)


def listening(*names: str) -> tuple[UpstreamCache, ReplicaPrefixes]:
    """A cache that tells, and an index with what it holds, after it was sent these requests."""
    cache, index = UpstreamCache("up"), ReplicaPrefixes()
    cache.listen([index])
    for name in names:
        cache.end(cache.begin(index, ask(name)))
    return cache, index


def held(index: ReplicaPrefixes, blocks: tuple[int, ...] = BLOCKS) -> int:
    return index.match(blocks).blocks("up")


def test_a_prompt_is_held_while_it_is_answered_and_as_told_from_then_on() -> None:
    cache, index = listening()
    sent = cache.begin(index, ask("a"))
    assert held(index) == 8
    cache.told([CachedPrompt("a", 1000, 512, False)])
    assert held(index) == 8, "the rest is being computed"
    cache.end(sent)
    assert held(index) == 4
    cache.told([CachedPrompt("a", 1000, 976, False)])
    assert held(index) == 7
    cache.told([CachedPrompt("a", 1000, 992, False)])
    assert held(index) == 8, "no whole block is missing"
    cache.told([CachedPrompt("a", 1000, 500, False), CachedPrompt("b", 1000, 992, False)])
    assert held(index) == 4, "and b is somebody else's"
    cache.told([CachedPrompt("a", 1000, 0, True)])
    assert (held(index), len(index)) == (0, 0)


def test_a_request_that_was_refused_leaves_nothing() -> None:
    cache, index = listening("a")
    assert len(index) == 0
    silent, assumed = UpstreamCache("up"), ReplicaPrefixes()
    silent.end(silent.begin(assumed, ask("a")))
    assert held(assumed) == 8, "who tells nothing may hold it"


def test_shared_blocks_stay_until_the_last_prompt_is_gone() -> None:
    cache, index = listening("a")
    cache.end(cache.begin(index, ask("b", (*BLOCKS[:4], 100, 101))))
    cache.told([CachedPrompt("a", 1000, 1000, False), CachedPrompt("b", 700, 700, False)])
    cache.told([CachedPrompt("b", 700, 480, True)])  # whose own blocks are gone
    assert held(index) == 8 and held(index, (100,)) == 0
    cache.told([CachedPrompt("a", 1000, 480, False)])
    assert held(index) == 3


def test_requests_of_one_name_are_not_taken_for_one_another() -> None:
    cache, index = listening("same")
    sent = cache.begin(index, ask("same", (100, 101)))
    cache.told([CachedPrompt("same", 1000, 992, False)])
    assert held(index) == 0 and held(index, (100, 101)) == 2
    cache.end(sent)
    assert len(index) == 0
    cache.end(cache.begin(index, ask("same")))
    cache.told([CachedPrompt("same", 1000, 992, False)])
    assert len(index) == 0, "it is not known which of them it is"


def test_who_is_listened_to_again_holds_what_it_tells_now() -> None:
    cache, index = listening("a", "b")
    cache.told([CachedPrompt("a", 1000, 1000, False)])
    cache.tells = False
    cache.end(cache.begin(index, ask("c", (100, 101))))
    assert held(index, (100, 101)) == 2, "as was sent"
    cache.listen([index])
    assert len(index) == 0
    cache.told([CachedPrompt("b", 1000, 600, False)])
    assert held(index) == 4
    cache.told([CachedPrompt("a", 1000, 0, True)])
    assert held(index) == 4, "which was forgotten before"


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_cache, "MOST_SENT", 20)
    cache, index = listening()
    for i in range(50):
        blocks = tuple(range(10 * i, 10 * i + 8))
        cache.end(cache.begin(index, ask(str(i), blocks)))
        cache.told([CachedPrompt(str(i), 1000, 1000, False)])
        assert held(index, blocks) == 8 and len(index) <= 20
    cache.told([CachedPrompt(str(i), 1000, 0, True) for i in range(50)])
    assert len(index) == 0


def test_an_engine_and_its_gateway_agree() -> None:
    """Whatever is told, in whatever order, prompts hold what was told of them last."""
    rng = random.Random(2)
    cache, index = listening()
    latest: dict[str, tuple[tuple[int, ...], int]] = {}
    for i in range(300):
        blocks = tuple(range(rng.randrange(1, 9))) + ((100 + i,) if rng.random() < 0.5 else ())
        cache.end(cache.begin(index, ask(str(i), blocks)))
        latest[str(i)] = blocks, 0
        for name in rng.sample(sorted(latest), min(len(latest), 3)):
            size = len(latest[name][0])
            count, last = rng.randrange(size + 1), rng.random() < 0.3
            cache.told([CachedPrompt(name, 1600 * size, 1600 * count, last)])
            latest[name] = latest[name][0], count
            if last:
                del latest[name]
        known = {block for blocks, count in latest.values() for block in blocks[:count]}
        assert len(index) == len(known) and all(index.match([b]).blocks("up") for b in known)


def test_upstreams_hear_it_in_every_model() -> None:
    upstreams = Upstreams()
    up = upstreams.add(Place("http://a"))
    upstreams.up(up, {"m": 0, "n": 0}, True)
    for model in ("m", "n"):
        lease = upstreams.choose(DEFAULT, model, ask(model)).lease
        assert lease is not None
        lease.end(True)

    def cached(model: str) -> int:
        (one,) = upstreams.explain(DEFAULT, model, ask("another"))
        return one.cost.cached

    assert (cached("m"), cached("n")) == (1023, 1023), "all but the last token, as it was sent"
    upstreams.listen(up)
    assert (cached("m"), cached("n")) == (0, 0)
    lease = upstreams.choose(DEFAULT, "n", ask("again")).lease
    assert lease is not None and (cached("m"), cached("n")) == (0, 1023)
    lease.end()
    up.cache.told([CachedPrompt("again", 1000, 500, False)])
    assert (cached("m"), cached("n")) == (0, 512)
