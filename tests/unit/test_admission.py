"""Who of busy, failing and absent upstreams gets a request, and who waits for whom."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from octavo.balance.cost import Ask
from octavo.gateway.admission import UpstreamQueue, WaitLimits
from octavo.gateway.errors import NoUpstream, UnknownModel
from octavo.gateway.upstream import DEFAULT, FALLBACK, ModelFigures, Place
from octavo.gateway.upstreams import UpstreamLease, Upstreams
from tests.unit.test_gateway_parts import POOLS, asked, known

MOMENT = 0.02  # seconds


def queue_of(upstreams: Upstreams, **limits: Any) -> UpstreamQueue:
    return UpstreamQueue(upstreams, WaitLimits(**limits))


def taken(upstreams: Upstreams, pool: str = DEFAULT) -> UpstreamLease:
    lease = upstreams.choose(pool, "m", Ask(1)).lease
    assert lease is not None
    return lease


def test_who_has_refused_is_as_good_as_full_for_a_while() -> None:
    async def test() -> None:
        upstreams = known("a", models="mx")
        queue = queue_of(upstreams, seconds=30)
        began = time.monotonic()
        taken(upstreams).end(rest=MOMENT)
        assert upstreams.choose(DEFAULT, "m", Ask(1)).full
        assert upstreams.choose(DEFAULT, "x", Ask(1)).lease is not None  # it is busy with the other
        lease = await queue.place(asked(), POOLS)
        assert time.monotonic() - began >= MOMENT and lease.upstream.rests == {}
        lease.end(rest=30)
        upstreams.down(lease.upstream, "gone")
        upstreams.up(lease.upstream, {"m": ModelFigures()}, own=True)
        assert upstreams.choose(DEFAULT, "m", Ask(1)).lease is not None

    asyncio.run(test())


def test_who_has_failed_a_request_gets_it_again_only_if_nobody_else_is_there() -> None:
    """Rather than wait for one that is full, it went back to who had just refused."""

    async def test() -> None:
        upstreams = known("a", "b", places=1)
        queue = queue_of(upstreams, seconds=MOMENT)
        b = upstreams.choose(DEFAULT, "m", Ask(1), {"a"}).lease
        assert b is not None and b.upstream.id == "b"
        with pytest.raises(NoUpstream):
            await queue.place(asked(), POOLS, barred={"a"})
        b.end()
        assert (await queue.place(asked(), POOLS, barred={"a"})).upstream.id == "b"
        upstreams.down(b.upstream, "gone")
        assert (await queue.place(asked(), POOLS, barred={"a"})).upstream.id == "a"

    asyncio.run(test())


def test_who_waits_for_others_than_one_is_in_nobodys_way() -> None:
    async def test() -> None:
        upstreams = known("a", "b", places=1)
        queue = queue_of(upstreams, seconds=30)
        a, b = taken(upstreams), taken(upstreams)
        first = asyncio.create_task(queue.place(asked(), POOLS, {a.upstream.id}))
        second = asyncio.create_task(queue.place(asked(), POOLS))
        await asyncio.sleep(0)
        a.end()
        assert (await second).upstream is a.upstream
        assert not first.done()
        b.end()
        assert (await first).upstream is b.upstream

    asyncio.run(test())


def test_a_sound_upstream_of_a_later_pool_comes_before_one_that_fails() -> None:
    async def test() -> None:
        upstreams = known("a", places=1)
        queue = queue_of(upstreams, seconds=MOMENT)
        for _ in range(5):
            taken(upstreams).end(False)
        assert (await queue.place(asked(), POOLS)).upstream.id == "a"  # it is the only one
        upstreams.up(upstreams.add(Place("http://b", FALLBACK)), {"m": ModelFigures()}, False)
        spare = await queue.place(asked(), POOLS)
        assert spare.upstream.id == "b"
        with pytest.raises(NoUpstream):
            await queue.place(asked(), POOLS)  # which is waited for
        assert queue.spare(asked(), POOLS, ()) is None

    asyncio.run(test())


def test_an_answer_that_has_begun_goes_on_at_octavos_servers_alone() -> None:
    async def test() -> None:
        upstreams = known("a")
        upstreams.up(upstreams.add(Place("http://b")), {"m": ModelFigures()}, own=False)
        queue, begun = (
            queue_of(upstreams, seconds=MOMENT),
            msgspec.structs.replace(asked(), begun=True),
        )
        a = upstreams.get("a")
        assert a is not None
        assert [up.id for up in queue.candidates(begun, POOLS)] == ["a"]
        upstreams.down(a, "gone")
        with pytest.raises(NoUpstream):
            await queue.place(begun, POOLS)
        waits = asyncio.create_task(queue_of(upstreams, seconds=30).place(begun, POOLS, {"a"}))
        await asyncio.sleep(0)
        upstreams.up(a, {"m": ModelFigures()}, own=True)
        assert (await waits).upstream is a

    asyncio.run(test())


def test_a_pool_of_which_nobody_is_there_is_waited_for() -> None:
    """Though others serve other models; a pool that nobody can be in is none."""

    async def test() -> None:
        upstreams = known("a")
        queue = queue_of(upstreams, seconds=MOMENT)
        with pytest.raises(UnknownModel):
            await queue.place(asked(), ("later",))
        queue.known = lambda pool: pool == "later"
        with pytest.raises(NoUpstream):
            await queue.place(asked(), ("later",))
        late = upstreams.add(Place("http://b", "later"))
        upstreams.down(late, "gone")
        with pytest.raises(NoUpstream):
            await queue.place(asked(), ("later",))
        upstreams.up(late, {"other": ModelFigures()}, own=True)
        with pytest.raises(UnknownModel, match="other"):
            await queue.place(asked(), ("later",))

    asyncio.run(test())


def test_a_probe_has_succeeded_once_its_first_token_comes() -> None:
    """Its stream may take minutes, in which the upstream got nothing."""
    now = [0.0]
    upstreams = Upstreams(clock=lambda: now[0])
    one = upstreams.add(Place("http://a"))
    upstreams.up(one, {"m": ModelFigures()}, own=True)
    before = taken(upstreams)
    for _ in range(5):
        taken(upstreams).end(False)
    now[0] = 2.0
    probe = taken(upstreams)
    before.end()  # of a client that leaves
    assert upstreams.choose(DEFAULT, "m", Ask(1)).lease is None
    probe.first()
    assert one.breaker.state == "closed"
    probe.end(False)
    assert one.breaker.state == "closed"
