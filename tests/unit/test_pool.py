"""Which model is loaded when, and which leaves for it: models that are only names and sizes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from octavo.checkpoint.pooling import Pooling
from octavo.client.base import EngineClient
from octavo.engine.request import SamplingParams
from octavo.errors import CheckpointError, OctavoError, Overloaded, RequestError
from octavo.generate.model import ServedModel
from octavo.server.models import model_cards
from octavo.server.pool import ModelPool
from octavo.server.registry import ModelLease, Registry
from octavo.server.sizes import SizeBounds


class Client:
    ready = True
    adapters: list[str] = []
    stats = {"blocks": 2}


@dataclass
class Source:
    """seconds: to load. error: instead of loading."""

    name: str
    total: int
    log: list[str]
    held: list[int] = field(default_factory=list)  # bytes of all models, after each load
    seconds: float = 0.0
    error: OctavoError | None = None
    created: int = 7
    bounds: SizeBounds = SizeBounds(10, 100)
    adapters: dict[str, str] = field(default_factory=dict)

    async def load(self) -> ServedModel:
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        self.log.append(f"+{self.name}")
        nothing: Any = None
        return ServedModel(
            name=self.name, aliases=(), tokenizer=nothing, template=None,
            client=cast(EngineClient, Client()), grammars=nothing, defaults=SamplingParams(),
            vocabulary=100, context=10, created=7, task="generate", pooling=Pooling("mean", True),
        )  # fmt: skip

    async def unload(self, model: ServedModel) -> None:
        await asyncio.sleep(0)
        self.log.append(f"-{self.name}")


class House:
    """Models a, b, c ... of 10 bytes each in a pool."""

    def __init__(self, budget: int, names: str = "abc", keep_alive: float | None = None) -> None:
        self.log: list[str] = []
        self.models = Registry()
        self.models.loader = self.pool = ModelPool(budget, keep_alive)
        self.sources = {n: Source(n, 10, self.log) for n in names}
        for name, source in self.sources.items():
            self.models.add(name, None, (f"org/{name}",), source)

    async def use(self, name: str, seconds: float = 0.0) -> str:
        lease = await self.models.acquire(name)
        try:
            entry = lease.entry
            await asyncio.sleep(seconds)
            assert entry.model is not None and self.pool.free >= 0
            return lease.model.name
        finally:
            lease.release()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


def test_the_least_recently_used_leaves() -> None:
    async def test() -> None:
        house = House(20)
        for name in ("a", "org/b", "a", "c", "b"):
            assert await house.use(name) == name[-1]
        assert house.log == ["+a", "+b", "-b", "+c", "-a", "+b"]
        assert [(card.name, card.state) for card in model_cards(house.models)] == [
            ("a", "unloaded"), ("b", "ready"), ("c", "ready"),
        ]  # fmt: skip
        assert house.models.ready

    run(test)


def test_no_model_leaves_while_it_answers() -> None:
    async def test() -> None:
        house = House(20)
        a, b = await house.models.acquire("a"), await house.models.acquire("b")
        third = asyncio.create_task(house.use("c"))
        await asyncio.sleep(0.05)
        assert house.log == ["+a", "+b"] and not third.done()
        b.release()  # not the one used longest ago, but the first that is idle
        assert await third == "c"
        assert house.log == ["+a", "+b", "-b", "+c"] and a.model.name == "a"
        a.release()

    run(test)


def test_a_model_in_constant_use_makes_room_too() -> None:
    """Overlapping requests: it gets no new ones while another waits for its memory, and then they
    get it back."""

    async def test() -> None:
        house, stop = House(10, "ab"), False

        async def busy() -> int:
            served = 0
            while not stop:
                assert await house.use("a", 0.01) == "a"
                served += 1
            return served

        tasks = [asyncio.create_task(busy()) for _ in range(3)]
        await asyncio.sleep(0.005)
        assert await house.use("b") == "b"
        seen = list(house.log)
        await asyncio.sleep(0.05)
        stop = True
        assert sum(await asyncio.gather(*tasks)) > 3
        assert seen == ["+a", "-a", "+b"] and house.log == [*seen, "-b", "+a"]

    run(test)


def test_many_requests_at_once() -> None:
    """Whatever comes: each is answered by its model, loads are shared, the budget holds."""

    async def test() -> None:
        house, rng = House(20, "abcd"), random.Random(3)
        asked = [rng.choice("abcd") for _ in range(300)]
        asking = [house.use(n, rng.random() / 100) for n in asked]
        assert await asyncio.gather(*asking) == asked
        assert len(house.log) < 50 and house.pool.free == 0
        assert all(e.users == 0 and not e.waiting and not e.leaving for e in house.models)

    run(test)


def test_who_leaves_the_queue_holds_nothing() -> None:
    async def test() -> None:
        house = House(10)
        house.sources["a"].seconds = 0.03
        waiting = [asyncio.create_task(house.use("a")) for _ in range(3)]
        await asyncio.sleep(0.01)
        waiting[1].cancel()
        assert [e.state for e in house.models] == ["loading", "unloaded", "unloaded"]
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(d) for d in done] == [str, asyncio.CancelledError, str]
        assert house.models.entry("a").users == 0 and await house.use("b") == "b"

    run(test)


def test_what_can_never_fit_is_refused_with_the_sum() -> None:
    async def test() -> None:
        house = House(20 << 20)
        house.sources["a"].total = 21 << 20
        with pytest.raises(RequestError) as refused:
            await house.use("a")
        assert (refused.value.status, refused.value.code) == (400, "insufficient_memory")
        assert str(refused.value) == "a does not fit: 21 MiB > 20 MiB"
        house.sources["b"].total = house.sources["c"].total = 15 << 20
        house.models.entry("b").pinned = True
        await house.use("b")
        with pytest.raises(RequestError, match=r"15 MiB \+ pinned models 15 MiB > 20 MiB"):
            await house.use("c")
        assert house.log == ["+b"]

    run(test)


def test_a_model_that_cannot_be_loaded() -> None:
    """Its clients learn that it is so, and not where it lies; the others and the budget are as before."""

    async def test() -> None:
        house = House(10)
        house.sources["a"].error = CheckpointError("/secret/place is damaged")
        for _ in range(2):
            with pytest.raises(RequestError) as refused:
                await house.use("a")
            assert refused.value.code == "invalid_model" and "secret" not in str(refused.value)
        assert await house.use("b") == "b" and house.pool.free == 0
        house.sources["a"].error = None
        assert await house.use("a") == "a"

    run(test)


def test_idle_models_leave_after_their_time() -> None:
    async def test() -> None:
        house = House(30, keep_alive=0.2)
        expiring = asyncio.create_task(house.pool.expire())
        house.models.entry("b").pinned = True
        lease = await house.models.acquire("c")
        for name in "ab":
            await house.use(name)
        assert [e.state for e in house.models] == ["ready"] * 3
        await asyncio.sleep(0.6)
        assert [e.state for e in house.models] == ["unloaded", "ready", "ready"]
        lease.release()
        assert await house.use("a") == "a"
        expiring.cancel()

    run(test)


def test_unloading_waits_for_answers() -> None:
    async def test() -> None:
        house = House(30)
        lease = await house.models.acquire("a")
        entry = lease.entry
        unloading = asyncio.create_task(house.pool.unload(entry))
        await asyncio.sleep(0.02)
        later = asyncio.create_task(house.use("a"))
        await asyncio.sleep(0.02)
        assert not unloading.done() and not later.done() and entry.state == "ready"
        lease.release()
        await unloading
        assert await later == "a" and house.log == ["+a", "-a", "+a"]

    run(test)


def test_the_end_ends_what_waits() -> None:
    async def test() -> None:
        house = House(10)
        house.sources["a"].seconds = 30
        waiting = asyncio.create_task(house.use("a"))
        await asyncio.sleep(0.01)
        await house.pool.close()
        with pytest.raises(Overloaded, match="shutting down"):
            await waiting
        house.models.draining = True
        with pytest.raises(Overloaded, match="shutting down"):
            await house.use("b")
        assert house.pool.free == 10

    run(test)


def test_at_the_start_nobody_waits() -> None:
    async def test() -> None:
        house = House(20)
        house.models.starting = True
        with pytest.raises(Overloaded, match="loading"):
            house.models.check_loaded()
        with pytest.raises(Overloaded, match="loading"):
            await house.use("a")
        assert not house.models.ready
        await house.pool.load(house.models.entry("a"))
        assert await house.use("a") == "a"
        house.models.starting = False
        assert await house.use("b") == "b" and house.models.ready

    run(test)


def test_a_lease_is_given_back_once() -> None:
    async def test() -> None:
        house = House(10)
        lease: ModelLease = await house.models.acquire("a")
        lease.release()
        lease.release()
        assert lease.entry.users == 0

    run(test)


def test_a_model_that_is_asked_for_as_it_falls_idle_is_waited_for() -> None:
    """The next request may come before the one that waits for room has noticed."""

    async def test() -> None:
        house = House(20)
        a, b = await house.models.acquire("a"), await house.models.acquire("b")
        third = asyncio.create_task(house.use("c"))
        await asyncio.sleep(0.05)
        b.release()
        again = await house.models.acquire("b")  # at once: b is idle for nobody
        await asyncio.sleep(0.05)
        assert not third.done() and house.log == ["+a", "+b"]
        a.release()
        assert await third == "c" and house.log == ["+a", "+b", "-a", "+c"]
        again.release()

    run(test)


def test_a_model_that_is_pinned_meanwhile_is_no_room() -> None:
    async def test() -> None:
        house = House(20, "ab")
        house.sources["b"].total = 15
        a = await house.models.acquire("a")
        other = asyncio.create_task(house.use("b"))
        await asyncio.sleep(0.05)
        a.entry.pinned = True
        a.release()
        with pytest.raises(RequestError, match="does not fit") as e:
            await other
        assert e.value.code == "insufficient_memory"
        assert house.log == ["+a"] and await house.use("a") == "a"

    run(test)


def test_unloading_goes_on_without_the_one_who_wanted_it() -> None:
    async def test() -> None:
        house, ended = House(10), asyncio.Event()
        source = house.sources["a"]
        unload = source.unload

        async def slowly(model: ServedModel) -> None:
            await ended.wait()
            await unload(model)

        source.unload = slowly  # type: ignore[method-assign]
        await house.use("a")
        leaving = asyncio.create_task(house.pool.unload(house.models.entry("a")))
        await asyncio.sleep(0)
        leaving.cancel()
        other = asyncio.create_task(house.use("b"))
        await asyncio.sleep(0.05)
        assert house.pool.free == 0 and not other.done()  # its engine has its memory still
        ended.set()
        assert await other == "b" and house.log == ["+a", "-a", "+b"]
        assert (await asyncio.gather(leaving, return_exceptions=True))[0].__class__ is (
            asyncio.CancelledError
        )

    run(test)
