"""Routing: the index against a naive one, the policies against looking at every replica."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.balance.chain import chain, text_chain
from octavo.balance.cost import Ask, cost
from octavo.balance.policies import POLICIES, Random
from octavo.balance.prefix_index import ReplicaMatch, ReplicaPrefixes
from octavo.balance.replica import Replica
from octavo.balance.router import Router, Sessions


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# -- chains -----------------------------------------------------------------------------------


def test_a_block_is_known_with_all_that_is_before_it() -> None:
    one = chain([1] * 16 + [2] * 16 + [3], 16)
    assert len(one) == 2
    assert chain([1] * 16 + [2] * 16, 16) == one
    assert chain([1] * 16 + [4] * 16, 16)[0] == one[0]
    assert chain([4] * 16 + [2] * 16, 16)[1] != one[1]
    assert chain([1] * 16, 16, "another") != one[:1]
    assert text_chain(b"abcdef", 4) == text_chain(b"abcdxy", 4)


# -- the index --------------------------------------------------------------------------------


class NaiveIndex:
    """What PrefixIndex has to say, from plain counts of who holds a block."""

    def __init__(self) -> None:
        self.held: dict[str, Counter[int]] = {name: Counter() for name in REPLICAS}

    def step(self, kind: str, replica: str, blocks: list[int]) -> None:
        held = self.held[replica]
        for block in blocks:
            if kind == "stored":
                held[block] = max(held[block], 1)
            elif kind == "removed":
                del held[block]
            elif kind == "hold":
                held[block] += 1
            elif kind == "release" and held[block] > 1:
                held[block] -= 1
            elif kind == "release":
                del held[block]
        if kind == "gone":
            held.clear()

    def blocks(self, replica: str, prompt: list[int]) -> int:
        held = self.held[replica]
        return next((i for i, block in enumerate(prompt) if block not in held), len(prompt))


REPLICAS = [f"r{i}" for i in range(5)]
BLOCKS = st.lists(st.integers(0, 12), max_size=8)
KINDS = ["stored", "removed", "hold", "release", "gone"]
STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from(REPLICAS), BLOCKS),
    max_size=40,
)


@given(STEPS, st.lists(BLOCKS, min_size=1, max_size=5))
def test_the_index_says_what_a_naive_one_does(
    steps: list[tuple[str, str, list[int]]], prompts: list[list[int]]
) -> None:
    index, naive = ReplicaPrefixes(), NaiveIndex()
    for kind, replica, blocks in steps:
        naive.step(kind, replica, blocks)
        if kind == "gone":
            index.remove_replica(replica)
        else:
            getattr(index, kind)(replica, blocks)
    assert len(index) == len(set().union(*naive.held.values()))
    assert [index.held(r) for r in REPLICAS] == [len(naive.held[r]) for r in REPLICAS]
    for prompt in prompts:
        match = index.match(prompt)
        expected = {r: naive.blocks(r, prompt) for r in REPLICAS}
        assert {r: match.blocks(r) for r in REPLICAS} == expected
        assert list(match.spread(float, slots_of(match)) + np.zeros(5)) == list(expected.values())


def slots_of(match: ReplicaMatch) -> NDArray[np.int64]:
    return np.array([match.slots.get(r, -1) for r in REPLICAS])


def test_the_index_is_bounded_and_leaves_nothing_behind() -> None:
    index = ReplicaPrefixes(limit=4)
    index.stored("a", range(6))
    assert (len(index), index.held("a")) == (4, 4)
    assert index.match([0]).blocks("a") == 0
    assert index.match([2, 3, 4, 5]).blocks("a") == 4
    index.remove_replica("a")
    assert (len(index), index.held("a")) == (0, 0)
    index.stored("b", [7])  # which takes the place of "a"
    assert index.match([7]).slots == {"b": 0}


def test_what_was_sent_last_is_remembered_beginnings_longest() -> None:
    index = ReplicaPrefixes(limit=4)
    index.sent("a", [1, 2, 3])
    index.sent("a", [1, 5, 6])
    assert index.match([1, 5, 6]).blocks("a") == 3
    assert index.match([1, 2, 3]).blocks("a") == 2  # 3 was forgotten, the end of the older one
    index.sent("a", [9, 10])
    assert index.match([9, 10]).blocks("a") == 2
    assert index.match([1, 2]).blocks("a") == 1
    empty = ReplicaPrefixes()
    assert Router(index=empty).index is empty


# -- the least cost ---------------------------------------------------------------------------

NAMES = st.sampled_from([f"r{i}" for i in range(12)])
FIGURES = st.builds(
    Replica, NAMES, st.sampled_from(["up", "up", "up", "full", "draining", "down"]),
    st.integers(0, 40), st.integers(0, 5), st.sampled_from([0, 100, 1000]), st.just(32),
    st.sampled_from([0.0, 0.001, 0.002, 0.00123]), st.sampled_from([0.0, 0.02, 0.0171]),
    st.sampled_from([0.0, 0.3]),
)  # fmt: skip
EVENTS = st.lists(FIGURES | st.tuples(NAMES, st.integers(0, 20)), max_size=20)


@pytest.fixture(params=[0, 3, 12])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many replicas are looked at one by one: none, some of these tests' fleets, all."""
    for module in ("replica", "policies"):
        monkeypatch.setattr(f"octavo.balance.{module}.FEW", request.param)


@pytest.mark.usefixtures("few")
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    EVENTS,
    st.builds(
        Ask,
        st.integers(0, 400),
        images=st.lists(st.integers(0, 3), max_size=2).map(tuple),
        reply=st.sampled_from([0, 50]),
    ),
    st.sets(NAMES, max_size=3),
)
def test_the_choice_is_that_of_looking_at_every_replica(
    events: list[Replica | tuple[str, int]], ask: Ask, barred: set[str]
) -> None:
    """Of equal costs, too. Events: a replica changes, holds so many blocks and an image, or (0) is
    forgotten."""
    router = Router()
    ask = msgspec.structs.replace(ask, blocks=tuple(range(min(ask.tokens // 16, 20))))
    for event in events:
        if isinstance(event, Replica):
            router.fleet.put(event)
        elif event[1]:
            router.index.stored(event[0], range(event[1]))
            router.images.sent(event[0], (event[1] % 4,))
        else:
            router.remove(event[0])
        decision = router.choose(ask, barred)
        match = router.index.match(ask.blocks)
        encoded = {
            r.id: sum(router.images.match([i]).blocks(r.id) for i in ask.images)
            for r in router.fleet
        }
        able = [r for r in router.fleet if r.state == "up" and r.id not in barred]
        costs = [(cost(r, ask, match.blocks(r.id), encoded[r.id]), r.requests, r.id) for r in able]
        least = min(costs, key=lambda c: (c[0].total, *c[1:]), default=None)
        found = decision and (decision.cost, router.fleet[decision.replica].requests, decision.replica)  # fmt: skip
        assert found == least


def test_images_are_found_among_many_replicas() -> None:
    """Replicas have come to the index of images in another order, and some have not."""
    names = [f"r{i:02}" for i in range(12)]
    router = router_of("cost", [Replica(name, prompt_token=0.001, image=0.5) for name in names])
    for name in names:
        router.index.stored(name, [1])
    for name in names[:0:-1]:
        router.images.sent(name, (int(name[1:]),))
    for image in (3, 11, 7):
        assert chosen(router, Ask(64, (1,))) == "r00"
        assert chosen(router, Ask(64, (2,), images=(image,))) == f"r{image:02}"


def test_costs_are_milliseconds_of_what_is_left_to_do() -> None:
    replica = Replica("a", "up", 3, 2, 500, 32, 0.001, 0.02, 0.3)
    found = cost(replica, Ask(100, images=(5,)), 4)
    assert (found.queue, found.prefill, found.images, found.cached) == (500, 36, 300, 64)
    assert found.total == 836
    assert cost(replica, Ask(100, images=(5,), reply=10), 4).total == 1036
    assert cost(replica, Ask(64), 4).cached == 63  # the last token is always computed
    full = msgspec.structs.replace(replica, running=32, waiting=0, waiting_tokens=0)
    assert cost(full, Ask(1)).queue == pytest.approx(1e3 * 0.02 * 128 / 32)


# -- policies ---------------------------------------------------------------------------------


def router_of(policy: str, replicas: list[Replica]) -> Router:
    router = Router(policy)
    for replica in replicas:
        router.fleet.put(replica)
    return router


ANY = Ask()


def chosen(router: Router, ask: Ask = ANY, barred: tuple[str, ...] = ()) -> str | None:
    route = router.choose(ask, barred)
    return route.replica if route else None


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_take_replicas_that_are_up_and_not_barred(policy: str) -> None:
    router = router_of(policy, [Replica("a"), Replica("b", "draining"), Replica("c", "down")])
    router.fleet.put(Replica("d"))
    router.fleet.put(Replica("e", "full"))
    assert {chosen(router, Ask(i, (i,))) for i in range(40)} <= {"a", "d"}
    assert chosen(router, barred=("a",)) == "d"
    assert chosen(router, barred=("a", "d")) is None
    router.remove("a")
    router.remove("d")
    assert chosen(router) is None


def test_ties_go_to_the_first() -> None:
    for policy in ("cost", "least-load"):
        router = router_of(policy, [Replica("b"), Replica("a"), Replica("c")])
        assert [chosen(router) for _ in range(3)] == ["a"] * 3
        router.fleet.put(Replica("a", running=1))
        assert chosen(router) == "b"


def test_round_robin_takes_turns_while_replicas_come_and_go() -> None:
    router = router_of("round-robin", [Replica("a"), Replica("b"), Replica("c")])
    assert [chosen(router) for _ in range(4)] == ["a", "b", "c", "a"]
    router.fleet.put(Replica("b", "draining"))
    assert [chosen(router) for _ in range(2)] == ["c", "a"]


def test_prefix_hash_keeps_prompts_together_and_moves_few() -> None:
    asks = [Ask(64, (n, n + 1000, n + 2000, n + 3000, 5)) for n in range(400)]
    router = router_of("prefix-hash", [Replica(f"r{i}") for i in range(8)])
    before = [chosen(router, ask) for ask in asks]
    assert before == [
        chosen(router, msgspec.structs.replace(ask, blocks=(*ask.blocks[:4], 6))) for ask in asks
    ]
    assert min(before.count(f"r{i}") for i in range(8)) > 20
    router.remove("r3")
    after = [chosen(router, ask) for ask in asks]
    assert [b for b in before if b != "r3"] == [a for b, a in zip(before, after, strict=True) if b != "r3"]  # fmt: skip


def test_random_is_as_its_seed() -> None:
    def some() -> list[str | None]:
        router = Router(Random(seed=5))
        for i in range(8):
            router.fleet.put(Replica(f"r{i}"))
        return [chosen(router) for _ in range(50)]

    assert some() == some() and len(set(some())) == 8


def test_requests_go_where_their_prefix_is_until_that_costs_more() -> None:
    replicas = [Replica(f"r{i}", prompt_token=0.001, places=32) for i in range(3)]
    router = router_of("cost", replicas)
    blocks = chain(range(160), 16)
    router.index.stored("r2", blocks)
    ask = Ask(165, blocks)
    assert router.choose(ask) is not None
    route = router.choose(ask)
    assert route is not None and (route.replica, route.why, route.cost.cached) == (
        "r2",
        "cost",
        160,
    )
    router.fleet.put(msgspec.structs.replace(replicas[2], waiting=1, waiting_tokens=161))
    assert chosen(router, ask) == "r0"
    assert [c.replica for c in router.explain(ask)] == ["r0", "r1", "r2"]
    assert [c.cost.total for c in router.explain(ask)] == pytest.approx([165, 165, 166])


def test_sessions_stay_while_their_replica_does() -> None:
    router = router_of("round-robin", [Replica("a"), Replica("b")])
    talk = Ask(session="s")
    assert [chosen(router, talk) for _ in range(3)] == ["a", "a", "a"]
    assert chosen(router) == "b"
    router.fleet.put(Replica("a", "draining"))
    assert [chosen(router, talk) for _ in range(2)] == ["b", "b"]
    router.fleet.put(Replica("a"))
    assert chosen(router, talk) == "b"


def test_sessions_come_back_to_a_replica_that_had_no_place_for_one_request() -> None:
    router = router_of("round-robin", [Replica("a"), Replica("b"), Replica("c")])
    talk = Ask(session="s")
    assert chosen(router, talk) == "a"
    router.fleet.put(Replica("a", "full"))
    assert chosen(router, talk) == "b"
    router.fleet.put(Replica("a"))
    assert [chosen(router, talk), chosen(router, talk, ("a",)), chosen(router, talk)] == ["a", "c", "a"]  # fmt: skip
    router.fleet.put(Replica("a", "down"))
    assert chosen(router, talk) == "b"
    router.fleet.put(Replica("a"))
    assert chosen(router, talk) == "b"


def test_sessions_are_forgotten_in_time_and_bounded() -> None:
    clock = Clock()
    sessions = Sessions(clock, limit=2, ttl=10)
    for name in ("x", "y", "z"):
        sessions.put(name, "a")
    assert [sessions.get(s) for s in ("x", "y", "z")] == ["", "a", "a"]
    clock.now = 6
    sessions.put("y", "b")
    clock.now = 11
    assert [sessions.get(s) for s in ("y", "z")] == ["b", ""]
    assert len(sessions) == 1


def test_a_session_takes_no_more_memory_whatever_it_is_called() -> None:
    sessions = Sessions(Clock())
    tracemalloc.start()
    try:
        for number in range(16):
            sessions.put(f"{number} " + "x" * 60_000, "a")
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 60_000 and sessions.get("3 " + "x" * 60_000) == "a"


def test_prefix_hash_without_blocks_still_chooses() -> None:
    assert chosen(router_of("prefix-hash", [Replica("a")]), Ask(5)) == "a"
