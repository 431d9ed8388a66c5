"""What a step is: planned once and frozen, in an order that can be replaced, committed with any number of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends.base import BLOCK, Sample, StepInput
from octavo.engine.engine import Engine
from octavo.engine.events import BeamText, Ended, Token, TokenEvent
from octavo.engine.kv import blocks_for
from octavo.engine.policy import FairPolicy
from octavo.engine.request import BeamSearch, Request, SamplingParams
from octavo.engine.scheduler import ScheduledSpan
from octavo.engine.sequence import Sequence
from tests.engine.test_engine import Counting, engine, finish, request


class ShortestFirst(FairPolicy):
    """Prompts by length, whatever their priority."""

    def key(self, sequence: Sequence) -> tuple[int, int]:  # type: ignore[override]
        return len(sequence.request.prompt), sequence.arrival


def test_another_policy_orders_admission_and_preemption() -> None:
    asked = [request("a", 40, 3), request("b", 20, 3, priority=-1), request("c", 5, 3)]
    order = {}
    for name, policy in (("priority", None), ("shortest", ShortestFirst())):
        e = engine(Counting(selected=1), policy=policy)
        for r in asked:
            e.add(r)
        order[name] = [r for r, _ in finish(e)]
    assert order == {"priority": ["b", "a", "c"], "shortest": ["c", "b", "a"]}

    def preempted(policy: object) -> set[str]:
        """Of two that do not fit together, the one that is taken back."""
        e, seen = engine(Counting(blocks=4), context=64, policy=policy), set()
        e.add(request("a", 30, 30))
        e.add(request("b", 20, 30))
        while e.has_work:
            e.step()
            seen |= {s.id for s in e.scheduler.waiting}
        assert e.stats().preemptions > 0
        return seen

    assert preempted(None) == {"b"} and preempted(ShortestFirst()) == {"a"}


def spans(e: Engine) -> list[ScheduledSpan]:
    e.step()
    return e.scheduler.plan()


def test_a_plan_stays_what_it_was() -> None:
    """Committing a step changes its sequences, not what was planned of them."""

    class Pooling(Counting):
        def hidden(self, first: int, count: int) -> np.ndarray:
            return np.ones((count, 4), np.float32)

    e = engine(Pooling(tokens=16, selected=16))
    scored = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=0)
    e.add(Request(id="a", prompt=[5] * 24, params=scored))
    e.add(Request(id="b", prompt=[6] * 24, params=SamplingParams(), pool="mean"))
    planned = []
    compute = e._compute
    e._compute = lambda spans: (planned.append((spans, [tuple(s) for s in spans])), compute(spans))[
        1
    ]  # type: ignore[method-assign]
    while e.has_work:
        e.step()
    assert all([tuple(s) for s in spans] == before for spans, before in planned)
    rows = [s for spans, _ in planned for s in spans]
    of_a = [s for s in rows if s.sequence.id == "a"]
    assert [i for s in of_a for i in s.prompt_logprobs] == list(range(1, 24))
    assert [i for s in rows if s.sequence.id == "b" for i in s.pooled] == list(range(24))
    assert [s.start for s in of_a if s.samples] == [of_a[-3].start, 24, 25]
    with pytest.raises(AttributeError):
        rows[0].length = 3  # type: ignore[misc]


@pytest.mark.parametrize("length", [100, 90, 69, 65, 64, 33])  # of several steps, or of one
def test_equal_prompts_are_computed_once(length: int) -> None:
    """All but their last token, whose logits each samples from; unrelated prompts go on."""
    executable = Counting(tokens=64, blocks=200)
    e = engine(executable)
    for i in range(6):
        e.add(Request(id=f"c{i}", prompt=[7] * length, params=request("x").params))
    e.add(request("a", 10))
    e.add(Request(id="salted", prompt=[7] * length, params=request("x").params, salt="s"))
    first = tokens(e, steps=1)
    assert {s.id for s in e.scheduler.waiting} >= {"c1", "c2", "c3", "c4", "c5"}
    given = tokens(e)
    names = ("a", "c0", "c1", "c2", "c3", "c4", "c5", "salted")
    assert [len(first.get(name, []) + given[name]) for name in names] == [5] * 8
    computed = sum(len(step.ids) for step in executable.steps)
    prompts = length + 5 + 10 + length
    assert computed == prompts + 8 * 4  # the last token of each is not computed
    counts = e.stats()
    assert counts.prompt_tokens - counts.cached_tokens == prompts
    assert counts.blocks_held == 0


def test_a_prompt_that_shares_a_beginning_waits_for_it() -> None:
    """However long it is itself, and only while another computes it."""
    executable = Counting(tokens=300, blocks=200)
    e = engine(executable)
    shared = list(range(100, 180))
    for name, rest in (("a", [1] * 50), ("b", [2] * 60), ("c", [])):
        e.add(Request(id=name, prompt=shared + rest, params=request("x").params))
    e.step()
    assert [s.id for s in e.scheduler.running] == ["a"]
    e.abort("a")
    finish(e)
    computed = sum(len(step.ids) for step in executable.steps)
    assert computed == 130 + (60 + 4) + (1 + 4) and e.stats().blocks_held == 0


def test_without_a_prefix_cache_nobody_waits() -> None:
    e = engine(Counting(tokens=200, blocks=200), prefix_caching=False)
    for name in "abc":
        e.add(Request(id=name, prompt=[7] * 50, params=request("x").params))
    e.step()
    assert len(e.scheduler.running) == 3


class Overlong(Counting):
    """Computes all steps it is asked for, past the end of a text."""

    def decode(self, step: StepInput, steps: int, ends: list[list[int]]) -> list[list[Sample]]:
        return super().decode(step, steps, [[] for _ in ends])


def tokens(e: Engine, steps: int = 10_000) -> dict[str, list[tuple[int, str | None]]]:
    out: dict[str, list[tuple[int, str | None]]] = {}
    while e.has_work and steps:
        steps -= 1
        for event in e.step():
            assert isinstance(event, Token)
            out.setdefault(event.id, []).append((event.token, event.finish))
    return out


def test_any_number_of_tokens_is_committed_up_to_the_end_of_the_text() -> None:
    """Accepted tokens after one that ends the text are dropped, and leave nothing in the cache."""
    params = SamplingParams(max_tokens=30, temperature=0, stop_token_ids=[117])
    asked = [Request(id="a", prompt=[1] * 10, params=params), request("b", 10, 30)]

    def run(executable: Counting, multi_step: float) -> tuple[Engine, dict[str, object]]:
        e = engine(executable, multi_step=multi_step)
        for r in asked:
            e.add(r)
        return e, dict(tokens(e))

    _, expected = run(Counting(), 0.0)
    e, given = run(Overlong(), 1e9)
    assert given == expected and given["a"] == [(i, "stop" if i == 117 else None) for i in range(110, 118)]  # fmt: skip
    assert e.stats().blocks_held == 0 and e.stats().generated_tokens == 38
    known = [1] * 10 + list(range(110, 118))
    match = e.index.match([*known, 118, 119], "")
    assert match.tokens == 17  # the last token is no part of what was computed
    e.index.free([*match.blocks, *([match.partial_block] if match.partial else [])])


def test_a_question_allocates_nothing() -> None:
    """Two sequences for which several steps in a row do not fit hold what they need and no more."""
    e = engine(Counting(blocks=4), multi_step=1e9)
    e.add(request("a", 9, 14))
    e.add(request("b", 25, 12))
    while e.has_work:
        e.step()
        lengths = [len(s.kv.tokens) for s in e.scheduler.running]
        assert e.stats().blocks_held <= sum(map(blocks_for, lengths))
    e = engine(Counting(blocks=4))
    e.add(request("a", 9, 14))
    e.add(request("b", 25, 12))
    planned = spans(e)
    before = e.stats().blocks_free, e.index.available
    assert e.scheduler.can_repeat(planned, 2) and not e.scheduler.can_repeat(planned, 9)
    assert (e.stats().blocks_free, e.index.available) == before
    e.scheduler.reserve(planned, 2)
    assert [len(s.sequence.kv.blocks) * BLOCK >= s.start + 2 for s in planned] == [True, True]


def test_available_blocks_are_those_that_can_be_allocated() -> None:
    e = engine(Counting(blocks=12), context=128)
    for name, prompt in (("a", 40), ("b", 33), ("c", 70)):
        e.add(request(name, prompt, 20))
    e.step()
    e.abort("a")
    e.step()
    available = e.index.available
    assert 0 < available < 12
    taken = []
    while (block := e.index.allocate()) is not None:
        taken.append(block)
    assert len(taken) == available and e.index.available == 0


def test_a_search_without_texts_names_its_cause() -> None:
    class NoCandidates(Counting):
        def step(self, step: StepInput) -> list[Sample]:
            return [Sample(-1, 0.0, [], []) for _ in step.sampling]

    e = engine(NoCandidates())
    params = SamplingParams(max_tokens=4, temperature=0, beam=BeamSearch(2), bad_words=[[7]])
    e.add(Request(id="a", prompt=[1] * 5, params=params))
    events: list[TokenEvent] = e.step()
    assert not any(isinstance(event, BeamText) for event in events)
    (ended,) = events
    assert isinstance(ended, Ended) and (ended.finish, ended.param) == ("refused", "bad_words")
    assert e.stats().blocks_held == 0 and not e.has_work
