"""Admission, order, deadlines, cancelling and failures, on an executable that only counts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from octavo.backends.base import BLOCK, Sample, StepInput, StepLimits
from octavo.engine.constraint import GrammarCompiler, TokenTable
from octavo.engine.engine import MULTI_STEP_SECONDS, Engine
from octavo.engine.events import Ended, Mark, PromptLogprobs, Times, Token, TokenEvent, ends
from octavo.engine.limits import MAX_FORCED
from octavo.engine.request import BeamSearch, Request, SamplingParams, Thinking, shown
from octavo.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Counting:
    """Samples the position of each row; remembers what it was asked to compute."""

    def __init__(self, tokens: int = 64, selected: int = 8, blocks: int = 32) -> None:
        self.limits = StepLimits(tokens, selected, blocks)
        self.task, self.causal = "generate", True
        self.steps: list[StepInput] = []
        self.fail = False

    def step(self, step: StepInput) -> list[Sample]:
        if self.fail:
            raise ValueError("broken")
        self.steps.append(step)
        assert (
            len(step.ids) <= self.limits.tokens and len(step.logits_indices) <= self.limits.selected
        )
        for first, count, start, table, _ in step.spans:
            assert step.positions[first : first + count].tolist() == list(
                range(start, start + count)
            )
            blocks = step.block_tables[
                table : table + (start + count + BLOCK - 1) // BLOCK
            ].tolist()
            assert len(set(blocks)) == len(blocks) and all(
                0 <= b < self.limits.blocks for b in blocks
            )
        return [Sample(100 + row.position, 0.0, [], []) for row in step.sampling]

    def decode(self, step: StepInput, steps: int, ends: list[list[int]]) -> list[list[Sample]]:
        out: list[list[Sample]] = []
        while len(out) < steps and not any(
            s.token in e for r in out[-1:] for s, e in zip(r, ends, strict=True)
        ):
            spans = [s._replace(position=s.position + len(out)) for s in step.spans]
            rows = [row._replace(position=row.position + len(out)) for row in step.sampling]
            at = step.positions + np.int32(len(out))
            out.append(self.step(replace(step, positions=at, spans=spans, sampling=rows)))
        return out

    def pack_pending(self) -> bool:
        return False

    def prefault_kv(self, reached: int, idle: bool) -> bool:
        return False

    def copy_block(self, source: int, target: int) -> None:
        assert source != target


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def engine(executable: Counting | None = None, context: int = 400, **options: object) -> Engine:
    options.setdefault("multi_step", 0.0)
    return Engine(executable or Counting(), 1000, context, frozenset({999}), **options)  # type: ignore[arg-type]


def request(name: str, prompt: int = 10, tokens: int = 5, **options: object) -> Request:
    params = SamplingParams(max_tokens=tokens, temperature=0)
    ids = [ord(name[0])] * prompt
    return Request(id=name, prompt=ids, params=params, **options)  # type: ignore[arg-type]


def finish(e: Engine, limit: int = 10_000) -> list[tuple[str, str]]:
    """(id, reason) in the order requests ended."""
    found: list[tuple[str, str]] = []
    for _ in range(limit):
        if not e.has_work:
            return found
        for event in e.step():
            if ends(event):
                assert isinstance(event, Token | Ended) and event.finish is not None
                found.append((event.id, event.finish))
    raise AssertionError("the engine does not finish")


def test_priority_then_deadline_then_arrival() -> None:
    e = engine(Counting(selected=1))
    for r in (request("c"), request("d"), request("b", timeout=100.0), request("a", priority=-1)):
        e.add(r)
    assert [name for name, _ in finish(e)] == ["a", "b", "c", "d"]


def test_long_prompts_do_not_hold_up_others() -> None:
    executable = Counting(tokens=32, blocks=64)
    e = engine(executable)
    e.add(request("a", 4, 50))
    e.step()
    e.add(request("b", 300, 2))
    before = len(executable.steps)
    while len(executable.steps) < before + 5:
        e.step()
    for step in executable.steps[before:]:
        assert 1 in [
            s.length for s in step.spans
        ]  # the running request gets its token in every step


def test_preemption_finishes_everything() -> None:
    e = engine(Counting(blocks=8), context=128)
    for name in "abcdef":
        e.add(request(name, 30, 60))
    assert sorted(finish(e)) == [(name, "length") for name in "abcdef"]
    assert e.stats().preemptions > 0 and e.stats().blocks_held == 0


def test_what_can_never_fit_is_refused() -> None:
    e = engine(Counting(blocks=8), context=400)
    with pytest.raises(
        RequestError, match=r"length is 128 tokens.*requested 135 tokens \(130 in the prompt, 5 in"
    ) as error:
        e.add(request("a", 130, 5))
    assert error.value.code == "context_length_exceeded"
    e.add(request("b", 123, 5))
    assert finish(e) == [("b", "length")]


def label(value: object) -> str:
    return value if isinstance(value, str) else shown(value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", float("nan")), ("top_p", 0), ("top_p", 1.1), ("min_p", -0.1),
        ("top_k", -1), ("max_tokens", -1), ("presence_penalty", 3), ("repetition_penalty", 0),
        ("logit_bias", {1000: 1.0}), ("logit_bias", {1: 1e308}), ("logprobs", 21), ("stop_token_ids", [-1]),
        ("seed", 1 << 70), ("top_k", 1 << 31), ("top_k", 1.0), ("top_k", True), ("top_k", None),
        ("max_tokens", 1 << 31), ("min_tokens", 1 << 31), ("temperature", "1"), ("repetition_penalty", 1e-30),
        ("allowed_token_ids", [1.0]), ("allowed_token_ids", [1] * 1001), ("logit_bias", {1: float("nan")}),
        ("stop_token_ids", [10**400]), ("bad_words", [[True]]),
    ]
    + [(f, 10**5000) for f in ("max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")]
    + [(f, v) for f in ("temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty") for v in (math.nan, math.inf, -math.inf, 10**400, None)],
    ids=label,
)  # fmt: skip
def test_bad_parameters_are_named(field: str, value: object) -> None:
    params = SamplingParams(**{field: value})  # type: ignore[arg-type]
    with pytest.raises(RequestError) as error:
        engine().add(Request(id="x", prompt=[1], params=params))
    assert error.value.param == field


@pytest.mark.parametrize("prompt", [[], [-1], [1000], [2**31], [10**400], [1.0], [True]])
def test_bad_prompts(prompt: list[int]) -> None:
    with pytest.raises(RequestError) as error:
        engine().add(Request(id="x", prompt=prompt, params=SamplingParams()))
    assert (error.value.param, error.value.code) == ("prompt", "invalid_value")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 1 << 31), ("priority", 0.5), ("timeout", 0), ("timeout", math.nan), ("timeout", 10**400),
        ("token_type_ids", [2] * 10), ("token_type_ids", [0]), ("resume", [1000]),
    ],
)  # fmt: skip
def test_bad_requests(field: str, value: object) -> None:
    with pytest.raises(RequestError) as error:
        engine().add(request("a", **{field: value}))  # type: ignore[arg-type]
    assert (error.value.param, error.value.code) == (field, "invalid_value")


def test_what_the_engine_cannot_do_is_refused_by_name() -> None:
    e = engine()
    grammar = SamplingParams(max_tokens=1, grammar="start: /a/")
    with pytest.raises(RequestError) as error:
        e.add(Request(id="a", prompt=[1], params=grammar))
    assert (error.value.param, error.value.code) == ("grammar", "unsupported_parameter")
    with pytest.raises(RequestError) as error:
        e.add(request("a", adapter="x"))
    assert (error.value.param, error.value.code) == ("adapter", "model_not_found")
    with pytest.raises(RequestError) as error:
        e.add(Request(id="a", prompt=[1] * 401, params=SamplingParams(), pool="mean"))
    assert (error.value.param, error.value.code) == ("prompt", "context_length_exceeded")
    e.add(request("a"))
    with pytest.raises(RequestError) as error:
        e.add(request("a"))
    assert error.value.param == "id" and finish(e) == [("a", "length")]


@pytest.mark.parametrize(
    ("params", "field"),
    [({"allowed_token_ids": [7], "bad_words": [[7]]}, "allowed_token_ids"), ({"bad_words": [[7]]}, "bad_words")],
)  # fmt: skip
def test_a_refusal_while_running_names_its_cause(params: dict[str, object], field: str) -> None:
    """An executable that finds no legal token says so with token -1."""

    class NoToken(Counting):
        def step(self, step: StepInput) -> list[Sample]:
            return [Sample(-1, 0.0, [], []) for _ in step.sampling]

    e = engine(NoToken())
    e.add(Request(id="a", prompt=[1], params=SamplingParams(**params)))  # type: ignore[arg-type]
    (ended,) = e.step()
    assert isinstance(ended, Ended) and ended.finish == "refused"
    assert (ended.param, ended.code) == (field, "constraint_failed")
    assert e.stats().blocks_held == 0 and not e.has_work


@pytest.mark.parametrize(
    ("name", "bad"),
    [("beam", BeamSearch(1 << 40)), ("beam", BeamSearch(2, 3)), ("beam", BeamSearch(2, 1, math.nan)),
     ("thinking", Thinking(1 << 31, [1])), ("thinking", Thinking(-1, [1])), ("thinking", Thinking(1, [1000])), ("thinking", Thinking(1, [1], 1000)), ("thinking", Thinking(1, [1], 1, [1000]))],
)  # fmt: skip
def test_bad_searches_and_thoughts(name: str, bad: object) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, **{name: bad})  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        engine().add(Request(id="x", prompt=[1], params=params))


def test_deadline_counts_waiting() -> None:
    clock = Clock()
    e = engine(Counting(selected=1), clock=clock)
    e.add(request("a", 10, 300))
    e.add(request("b", 10, 5, timeout=1.0))
    e.step()
    clock.now = 102.0
    found = [x for x in e.step() if ends(x)]
    assert found == [Ended("b", "deadline", times=Times(100.0, 100.0, 100.0, 100.0))]
    e.abort("a")
    assert e.stats().blocks_held == 0


def test_tokens_tell_when_things_happened() -> None:
    clock = Clock()
    e = engine(Counting(selected=1), clock=clock)
    e.add(request("a", 10, 3))
    clock.now = 100.5
    e.add(request("b", 10, 2))
    times: dict[str, list[Times]] = {"a": [], "b": []}
    while e.has_work:
        for event in e.step():
            assert isinstance(event, Token)
            times[event.id].append(event.times)
        clock.now += 1.0
    parts = [[Mark(100.5, 10)], [], []]  # of a prompt, told with the event after them
    assert times["a"] == [Times(100.0, 100.5, 100.5, 100.5 + i, parts[i]) for i in range(3)]
    parts = [[Mark(103.5, 10)], []]
    assert times["b"] == [Times(100.5, 103.5, 103.5, 103.5 + i, parts[i]) for i in range(2)]


def test_marks_tell_of_every_part_and_every_preemption() -> None:
    e = engine(Counting(tokens=32, blocks=8), context=128, prefix_caching=False)
    lengths = {"a": 50, "b": 40}
    for name, length in lengths.items():
        e.add(request(name, length, 50))
    marks: dict[str, list[int]] = {name: [] for name in lengths}
    while e.has_work:
        for event in e.step():
            assert isinstance(event, Token)
            marks[event.id] += [mark.tokens for mark in event.times.marks]
    assert sum(found.count(0) for found in marks.values()) == e.stats().preemptions > 0
    for name, length in lengths.items():
        first = marks[name].index(0) if 0 in marks[name] else len(marks[name])
        assert sum(marks[name][:first]) == length and max(marks[name]) <= 32


def test_abort_frees_at_once() -> None:
    e = engine()
    for name in "abc":
        e.add(request(name, 40, 100))
    e.step()
    e.abort("b")
    e.abort("nobody")
    held = e.stats().blocks_held
    for name in "ac":
        e.abort(name)
    assert held > 0 and e.stats().blocks_held == 0 and not e.has_work


def test_eos_and_stop_tokens_end() -> None:
    class Ends(Counting):
        def step(self, step: StepInput) -> list[Sample]:
            return [Sample(999 if row.position == 12 else 5, 0.0, [], []) for row in step.sampling]

    e = engine(Ends())
    e.add(request("a", 10, 50))
    e.add(Request(id="b", prompt=[1] * 10, params=SamplingParams(stop_token_ids=[5])))
    e.add(Request(id="c", prompt=[2] * 10, params=SamplingParams(ignore_eos=True, max_tokens=6)))
    assert sorted(finish(e)) == [("a", "stop"), ("b", "stop"), ("c", "length")]


def test_steady_requests_take_several_steps_in_a_row() -> None:
    def run(multi_step: float, **second: object) -> tuple[dict[str, list[int]], int, int]:
        executable = Counting()
        e, out, calls = engine(executable, multi_step=multi_step), {"a": [], "b": []}, 0
        e.add(request("a", 10, 30))
        params = SamplingParams(max_tokens=30, stop_token_ids=[117], **second)  # type: ignore[arg-type]
        e.add(Request(id="b", prompt=[1] * 10, params=params))
        while e.has_work:
            calls += 1
            for event in e.step():
                assert isinstance(event, Token)
                out[event.id].append(event.token)
        assert e.stats().blocks_held == 0 and e.stats().steps == len(executable.steps)
        return out, calls, len(executable.steps)

    expected, calls, steps = run(0.0)
    assert calls == steps == 30 and expected["b"] == list(range(110, 118))
    given, calls, steps = run(1e9)
    assert given == expected and steps == 30 and calls <= 6
    for second in ({"bad_words": [[7]]}, {"presence_penalty": 1.0}, {"min_tokens": 8}):
        given, calls, steps = run(1e9, **second)
        assert given == expected and steps == 30 and 8 < calls < 16  # one by one while "b" runs


class Timed(Counting):
    """Steps take some time of a clock. asked: how many each call was to compute."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.asked: list[int] = []

    def step(self, step: StepInput) -> list[Sample]:
        self.clock.now += self.seconds
        return super().step(step)

    def decode(self, step: StepInput, steps: int, ends: list[list[int]]) -> list[list[Sample]]:
        self.asked.append(steps)
        return super().decode(step, steps, ends)


@pytest.mark.parametrize(
    ("seconds", "steps"), [(0.004, 5), (0.0067, 3), (0.0085, 2), (0.013, 2), (0.014, 1)]
)
def test_a_call_of_several_steps_comes_near_to_a_fiftieth_of_a_second(
    seconds: float, steps: int
) -> None:
    executable = Timed(Clock(), seconds)
    e = engine(executable, multi_step=MULTI_STEP_SECONDS, clock=executable.clock)
    e.add(request("a", tokens=1 + 4 * steps))
    finish(e)
    assert executable.asked == ([] if steps == 1 else [steps] * 4)


POISON = chr(700)  # its prompt holds token 700


class Picky(Counting):
    """Cannot compute steps that hold a certain token."""

    def step(self, step: StepInput) -> list[Sample]:
        if ord(POISON) in step.ids:
            raise TypeError("incompatible function arguments")
        return super().step(step)


@pytest.mark.parametrize("multi_step", [0.0, 1e9])
def test_a_failing_sequence_fails_alone(multi_step: float) -> None:
    """Neighbours get what they get without it, token by token."""

    def run(*names: str) -> dict[str, list[tuple[int | None, str | None]]]:
        e = engine(Picky(), multi_step=multi_step)
        out: dict[str, list[tuple[int | None, str | None]]] = {name: [] for name in names}
        for name in names:
            e.add(request(name, ord(name) % 7 + 5, 12))
        while e.has_work:
            for event in e.step():
                assert isinstance(event, Token | Ended)
                out[event.id].append((getattr(event, "token", None), event.finish))
        assert e.stats().blocks_held == 0
        return out

    together, without = run("a", "b", POISON, "c"), run("a", "b", "c")
    assert together.pop(POISON) == [(None, "error")]
    assert together == without and len(without["a"]) == 12


def test_what_goes_wrong_after_a_step_is_its_own() -> None:
    """Also where it happens while a token is taken, or a grammar made ready."""

    class Odd(Counting):
        def step(self, step: StepInput) -> list[Sample]:
            drawn = super().step(step)
            ids = step.ids[step.logits_indices].tolist()
            return [
                s._replace(token=None) if t == ord("x") else s
                for s, t in zip(drawn, ids, strict=True)
            ]  # type: ignore[arg-type]

    e = engine(Odd())
    for name in "axb":
        e.add(request(name))
    assert sorted(finish(e)) == [("a", "length"), ("b", "length"), ("x", "error")]
    assert e.stats().blocks_held == 0

    class Panic(BaseException):
        """As those of Rust arrive in Python."""

    class Compiler(GrammarCompiler):
        def _compile(self, grammar: str) -> LLMatcher:
            raise Panic

    e = engine(grammars=Compiler(TokenTable([], [], [999]), 1000))
    e.add(request("a"))
    params = SamplingParams(max_tokens=5, grammar="start: /a/")
    e.add(Request(id="g", prompt=[1], params=params))
    assert sorted(finish(e)) == [("a", "length"), ("g", "refused")]


def test_a_failing_step_fails_its_requests_only() -> None:
    executable = Counting()
    e = engine(executable)
    e.add(request("a"))
    executable.fail = True
    assert finish(e) == [("a", "error")]
    executable.fail = False
    e.add(request("b"))
    assert finish(e) == [("b", "length")]
    assert e.stats().blocks_held == 0


def test_what_went_wrong_is_told_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The text of an error may hold a prompt's; the log says which request and where."""

    class Quoting(Counting):
        def step(self, step: StepInput) -> list[Sample]:
            raise ValueError("the prompt was: my secret")

    class Compiler(GrammarCompiler):
        def _compile(self, grammar: str) -> LLMatcher:
            raise KeyError("my secret")

    e = engine(Quoting(), grammars=Compiler(TokenTable([], [], [999]), 1000))
    e.add(request("a"))
    e.add(request("b"))
    e.add(Request(id="g", prompt=[1], params=SamplingParams(grammar="start: /a/")))
    events: list[TokenEvent] = []
    while e.has_work:
        events += e.step()
    assert {(v.id, v.finish, v.error) for v in events if isinstance(v, Ended)} == {
        (name, "error", "the engine could not compute this request") for name in "abg"
    }
    assert "my secret" not in caplog.text
    assert all(f"request {name} could not be computed" in caplog.text for name in "abg")


def test_cached_prefixes_are_reported() -> None:
    executable = Counting()
    e = engine(executable)
    e.add(request("a", 40, 3))
    finish(e)
    e.add(Request(id="b", prompt=[97] * 30 + [1] * 10, params=SamplingParams(max_tokens=3)))
    events: list[TokenEvent] = []
    while e.has_work:
        events += e.step()
    assert events[0].cached == 30  # one whole block, and fourteen tokens of the next
    assert executable.steps[-3].spans[0].length == 10


def test_cached_prefixes_are_counted_once_for_each_request() -> None:
    """Also of those that are preempted, go on after others, or draw no token."""
    executable = Counting()
    executable.hidden = lambda _, count: np.ones((count, 4), np.float32)  # type: ignore[attr-defined]
    e = engine(executable)
    more: list[dict[str, Any]] = [{}, {}, {"resume": [5, 6]}, {"pool": "last"}]
    for name, options in zip("abcd", more, strict=True):
        e.add(Request(id=name, prompt=[7] * 40, params=SamplingParams(max_tokens=9), **options))
        e.step()
        for sequence in list(e.scheduler.running):
            e.scheduler.preempt(sequence)
        while e.has_work:
            e.step()
    stats = e.stats()
    assert stats.prompt_tokens == 4 * 40 and stats.cached_tokens == 39 + 40 + 39


def generated(e: Engine) -> list[int]:
    events: list[TokenEvent] = []
    while e.has_work:
        events += e.step()
    return [event.token for event in events if isinstance(event, Token)]


def test_thoughts_end_with_their_budget() -> None:
    """After 4 tokens the closing ones come, without a step of their own; not if the model closed."""
    thinking = Thinking(budget=4, closing=[900, 901])
    e = engine()
    e.add(
        Request(
            id="a",
            prompt=[1] * 10,
            params=SamplingParams(max_tokens=8, temperature=0, thinking=thinking),
        )
    )
    tokens = generated(e)
    assert tokens == [110, 111, 112, 113, 900, 901, 116, 117]
    assert e.stats().steps == 6
    closed = Thinking(budget=4, closing=[111, 901])
    e.add(
        Request(
            id="b",
            prompt=[1] * 10,
            params=SamplingParams(max_tokens=6, temperature=0, thinking=closed),
        )
    )
    assert 901 not in generated(e)


@pytest.mark.parametrize(
    ("opening", "blank", "expected"),
    [
        (110, [], [110, 111, 112, 900, 901, 115, 116, 117]),
        (111, [], [110, 111, 112, 113, 114, 115, 116, 117]),  # not the first token
        (112, [110, 111], [110, 111, 112, 113, 114, 900, 901, 117]),
        (112, [110], [110, 111, 112, 113, 114, 115, 116, 117]),
    ],
)
def test_thoughts_that_the_model_opens_end_with_their_budget(
    opening: int, blank: list[int], expected: list[int]
) -> None:
    thinking = Thinking(budget=2, closing=[900, 901], opening=opening, blank=blank)
    e = engine()
    params = SamplingParams(max_tokens=8, temperature=0, thinking=thinking)
    e.add(Request(id="a", prompt=[1] * 10, params=params))
    assert generated(e) == expected


def test_a_text_without_a_choice_holds_up_nobody() -> None:
    """Its tokens need no step of their own, but time all the same."""

    class Only(Counting):
        def step(self, step: StepInput) -> list[Sample]:
            super().step(step)
            return [Sample(5, 0.0, [], []) for _ in step.sampling]

    e = engine(Only(blocks=90), context=1400)
    e.add(Request(id="a", prompt=[1], params=SamplingParams(allowed_token_ids=[5])))
    counts = []
    while e.has_work:
        events = e.step()
        assert all(isinstance(x, Token) and x.token == 5 for x in events)
        counts.append(len(events))
    assert sum(counts) == 1399 and max(counts) == 1 + MAX_FORCED


def test_bad_words_and_min_tokens_are_masked() -> None:
    executable = Counting()
    e = engine(executable)
    params = SamplingParams(
        max_tokens=4, temperature=0, min_tokens=2, bad_words=[[110, 111], [500]], stop_token_ids=[7]
    )
    e.add(Request(id="a", prompt=[1] * 10, params=params))
    finish(e)
    banned = [
        {t for t, add, _ in s.sampling[0].adjustments if add == -math.inf} for s in executable.steps
    ]
    assert banned == [{999, 7, 500}, {999, 7, 500, 111}, {500}, {500}]


def test_a_prompt_is_computed_for_the_cache_alone() -> None:
    """As prompts are: in whole steps and without a row of results, also beside texts; and once."""
    executable = Counting(tokens=64, blocks=128)
    e = engine(executable, context=1000)
    for steps in (7, 1):  # 400 tokens, then one that the cache does not have
        before = len(executable.steps)
        e.add(Request(id="a", prompt=[5] * 400, params=SamplingParams(max_tokens=0)))
        assert finish(e) == [("a", "length")]
        made = executable.steps[before:]
        assert len(made) == steps and all(not len(step.logits_indices) for step in made)
    for name in "bcdefgh":
        e.add(request(name, 10, 300))
    e.step()
    before = len(executable.steps)
    e.add(Request(id="a", prompt=[6] * 300, params=SamplingParams(max_tokens=0)))
    while not any(event.id == "a" and ends(event) for event in e.step()):
        assert len(executable.steps) < before + 12
    finish(e)
    assert e.stats().blocks_held == 0


def test_prompts_are_scored_within_the_rows_of_a_step() -> None:
    executable = Counting(selected=4)
    e = engine(executable)
    for name in "ab":
        params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0)
        e.add(Request(id=name, prompt=[5] * 20, params=params))
    e.add(request("c", 30, 5))
    scores: dict[str, int] = {"a": 0, "b": 0}
    while e.has_work:
        for event in e.step():
            if isinstance(event, PromptLogprobs):
                scores[event.id] += len(event.logprobs)
    assert scores == {"a": 19, "b": 19}
