"""Who is computed when: the orders of one tenant, and equal work of several. Steps are the clock."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.engine import Engine
from octavo.engine.events import Token
from octavo.engine.policy import GENERATED, PROMPT, REMEMBERED, FairPolicy
from octavo.engine.request import Request, SamplingParams
from tests.engine.test_engine import Clock, Counting, engine

BUDGET = 64


def ask(e: Engine, name: str, tenant: str = "", prompt: int = 10, tokens: int = 5, **more: object) -> None:  # fmt: skip
    """A request whose prompt nobody shares."""
    ids = random.Random(name).choices(range(900), k=prompt)
    params = SamplingParams(max_tokens=tokens, temperature=0)
    e.add(Request(id=name, prompt=ids, params=params, tenant=tenant, **more))  # type: ignore[arg-type]


def first_tokens(e: Engine) -> list[str]:
    """Ids in the order of their first tokens."""
    order: dict[str, None] = {}
    while e.has_work:
        for event in e.step():
            assert isinstance(event, Token)
            order.setdefault(event.id)
    return list(order)


def test_first_come_first_served() -> None:
    e = engine(Counting(selected=1))
    for name in "bcad":
        ask(e, name)
    assert first_tokens(e) == ["b", "c", "a", "d"]


def test_priorities_then_deadlines_then_arrival() -> None:
    e = engine(Counting(selected=1), clock=Clock())
    for name, priority, timeout in (
        ("a", 0, None), ("b", 0, 90.0), ("c", 1, 5.0), ("d", -1, None), ("e", 0, 40.0), ("f", -1, 80.0),
    ):  # fmt: skip
        ask(e, name, priority=priority, timeout=timeout)
    assert first_tokens(e) == ["f", "d", "e", "b", "a", "c"]


def test_tenants_take_turns_however_many_requests_each_has() -> None:
    e = engine(Counting(selected=1))
    for i in range(9):
        ask(e, f"a{i}", "a")
    for i in range(3):
        ask(e, f"b{i}", "b")
    order = first_tokens(e)
    assert [name[0] for name in order[:6]] in (list("ababab"), list("abbaba"))
    assert order[-3:] == ["a6", "a7", "a8"]


def test_a_newcomer_need_not_wait_for_a_flood() -> None:
    """All rows are taken by texts that have long to go: it gets its share of them at once."""
    executable = Counting(selected=4, blocks=200)
    e = engine(executable)
    for i in range(40):
        ask(e, f"a{i}", "a", tokens=300)
    for _ in range(20):
        e.step()
    before = {s.id: list(s.kv.tokens) for s in e.scheduler.running}
    assert len(before) == 4
    for i in range(9):
        ask(e, f"b{i}", "b", tokens=300)
    assert "b0" in [event.id for event in e.step()]  # the very next step
    for _ in range(6):
        e.step()
    tenants = [s.request.tenant for s in e.scheduler.running]
    assert sorted(tenants) == ["a", "a", "b", "b"]  # and no more than that
    kept = {s.id: s.kv.tokens for s in [*e.scheduler.running, *e.scheduler.waiting]}
    assert all(kept[name][: len(tokens)] == tokens for name, tokens in before.items())
    assert e.stats().preemptions == 2


def test_of_more_tenants_than_places_each_has_one() -> None:
    e = engine(Counting(selected=4, blocks=200))
    for i in range(8):
        ask(e, f"a{i}", "a", tokens=300)
    for _ in range(20):
        e.step()
    for i in range(6):
        ask(e, f"{i}", f"{i}", tokens=200)
    for _ in range(9):
        e.step()
    assert len({s.request.tenant for s in e.scheduler.running}) == 4
    assert e.stats().preemptions == 3  # nobody gives way to who would have no fewer


def test_lower_classes_do_not_take_the_place_of_higher() -> None:
    e = engine(Counting(selected=2, blocks=200))
    for i in range(4):
        ask(e, f"a{i}", "a", tokens=100, priority=-1)
    for _ in range(5):
        e.step()
    ask(e, "b0", "b", tokens=20)
    for _ in range(20):
        e.step()
    assert {s.request.tenant for s in e.scheduler.running} == {"a"}


shapes = st.tuples(st.integers(1, 60), st.integers(1, 25))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(shapes, min_size=3, max_size=6), min_size=2, max_size=4), st.integers(1, 4)
)
def test_lag_is_bounded_by_one_request(tenants: list[list[tuple[int, int]]], rows: int) -> None:
    """Of two tenants that always have a request that waits, neither is ahead of the other by more
    than what its running requests are: one where one runs at a time, and a step."""
    policy = FairPolicy()
    e = engine(Counting(tokens=BUDGET, selected=rows, blocks=400), policy=policy)
    largest = max(PROMPT * p + GENERATED * n for requests in tenants for p, n in requests)
    for t, requests in enumerate(tenants):
        for i in range(len(requests) * rows):
            prompt, tokens = requests[i % len(requests)]
            ask(e, f"{t}.{i}", str(t), prompt, tokens)
    while e.has_work:
        e.step()
        waiting = {s.request.tenant for s in e.scheduler.waiting}
        work = [policy.work[t] for t in waiting]
        if len(work) > 1:
            assert max(work) - min(work) <= rows * largest + GENERATED * BUDGET
    assert e.stats().blocks_held == 0


def test_nobody_saves_up() -> None:
    """A tenant that did nothing while another worked gets no more than its share afterwards."""
    policy = FairPolicy()
    e = engine(Counting(selected=1), policy=policy)
    ask(e, "b0", "b")
    first_tokens(e)
    for i in range(6):
        ask(e, f"a{i}", "a")
        first_tokens(e)
    for i in range(4):
        ask(e, f"b{i + 1}", "b")
        ask(e, f"a{i + 6}", "a")
    order = [name[0] for name in first_tokens(e)]
    assert all(abs(order[:n].count("a") - order[:n].count("b")) <= 1 for n in range(9))


def test_gone_tenants_are_forgotten() -> None:
    policy = FairPolicy()
    e = engine(Counting(), policy=policy)
    for i in range(REMEMBERED + 50):
        ask(e, f"{i}", f"t{i}", prompt=2, tokens=1)
        first_tokens(e)
    assert len(policy.work) <= REMEMBERED + 1


@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_computed_does_not_depend_on_tenants(rows: int) -> None:
    def run(split: bool) -> dict[str, list[int]]:
        e, out = engine(Counting(selected=rows, blocks=60)), {}
        for i in range(12):
            ask(e, f"{i}", str(i % 3) if split else "", prompt=5 + 7 * i, tokens=4 + i)
        while e.has_work:
            for event in e.step():
                assert isinstance(event, Token)
                out.setdefault(event.id, []).append(event.token)
        return out

    assert run(True) == run(False)


wishes = st.tuples(
    st.integers(-2, 2), st.none() | st.integers(1, 50), st.none() | st.integers(1, 50)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(wishes, min_size=2, max_size=12))
def test_the_order_of_one_tenant(asked: list[tuple[int, int | None, int | None]]) -> None:
    """By priority, then by when it is due, then first come, first served: whatever is asked for."""
    e = engine(Counting(selected=1), clock=Clock())
    due = []
    for i, (priority, timeout, ttft) in enumerate(asked):
        wanted = [s for s in (timeout, ttft) if s is not None]
        ask(e, str(i), priority=priority, timeout=timeout, ttft=ttft)
        due.append((priority, min(wanted, default=99), i))
    assert first_tokens(e) == [str(i) for *_, i in sorted(due)]


def test_a_higher_class_takes_places_and_blocks_at_once() -> None:
    """P0 before P1 before P2, also where all is taken; what gives way goes on later where it was."""
    for limits in ({"selected": 2, "blocks": 200}, {"selected": 8, "blocks": 12}):
        e = engine(Counting(**limits), context=192)
        alone = engine(Counting(**limits), context=192)
        for name in ("low0", "low1"):
            ask(e, name, prompt=60, tokens=30, priority=1)
            ask(alone, name, prompt=60, tokens=30, priority=1)
        said: dict[str, list[int]] = {}

        def step(e: Engine, said: dict[str, list[int]]) -> list[str]:
            events = [event for event in e.step() if isinstance(event, Token)]
            for event in events:
                said.setdefault(event.id, []).append(event.token)
            return [event.id for event in events]

        while len(said.get("low1", [])) < 9:
            step(e, said)
        for name, priority in (("middle", 0), ("high", -1)):
            ask(e, name, prompt=60, tokens=8, priority=priority)
            while "high" not in said and name not in said:
                running = {s.id for s in e.scheduler.running}
                assert name in step(e, said) or name not in running
            assert e.stats().preemptions >= 1
        while e.has_work:
            step(e, said)
        expected: dict[str, list[int]] = {}
        while alone.has_work:
            step(alone, expected)
        assert {n: said[n] for n in expected} == expected and e.stats().blocks_held == 0


def test_a_newcomer_gets_its_share_of_the_blocks() -> None:
    """Where a flood holds them all, and there are places for everybody."""
    e = engine(Counting(selected=8, blocks=24), context=160)
    for i in range(20):
        ask(e, f"a{i}", "a", prompt=40, tokens=100)
    for _ in range(40):
        e.step()
    assert e.stats().blocks_free + e.stats().blocks_cached <= 4  # one that waits needs 5
    ask(e, "b", "b", prompt=60, tokens=20)
    seen: list[str] = []
    for _ in range(2):
        seen += [event.id for event in e.step() if isinstance(event, Token)]
    assert "b" in seen
    e.abort("b")
    before = e.stats().preemptions
    ask(e, "large", "b", prompt=150, tokens=5)  # more than its share: it waits for what gets free
    e.step()
    assert e.stats().preemptions == before
    while e.has_work and "large" not in seen:
        seen += [event.id for event in e.step() if isinstance(event, Token)]
    assert "large" in seen
