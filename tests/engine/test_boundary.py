"""What native code takes: nothing that passes the checks of a request can harm it, and a step that points outside its
arrays is refused."""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import _native
from octavo.backends.base import SamplingRow, Span, StepInput
from octavo.engine.admission import Admission
from octavo.engine.request import Request, SamplingParams
from octavo.engine.sampling_state import SamplingState
from octavo.errors import RequestError
from tests.conftest import Runner
from tests.small_models import Small, save_hf

VOCABULARY = 70
ADMISSION = Admission(VOCABULARY, 100, "generate", grammars=False, adapters=False)
INTEGERS = st.integers(-(1 << 70), 1 << 70) | st.sampled_from(
    [0, 1, (1 << 31) - 1, 1 << 31, 10**400]
)
NUMBERS = (
    st.floats() | st.sampled_from([0.0, 5e-324, 1e-45, 1e-40, 1e-30, 0.5, 1.0, 2.0]) | INTEGERS
)
FIELDS = {
    "temperature": NUMBERS, "top_p": NUMBERS, "min_p": NUMBERS, "typical_p": NUMBERS, "presence_penalty": NUMBERS,
    "frequency_penalty": NUMBERS, "repetition_penalty": NUMBERS, "top_k": INTEGERS, "seed": INTEGERS,
    "logprobs": INTEGERS, "min_tokens": INTEGERS, "logit_bias": st.dictionaries(INTEGERS, NUMBERS, max_size=3),
    "allowed_token_ids": st.lists(INTEGERS, max_size=3), "bad_words": st.lists(st.lists(INTEGERS, max_size=2), max_size=2),
}  # fmt: skip


SMALLEST = 5e-324
EDGES = {
    "temperature": st.floats(0, 2), "top_p": st.floats(SMALLEST, 1), "min_p": st.floats(0, 1),
    "typical_p": st.floats(SMALLEST, 1), "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2), "repetition_penalty": st.floats(0.01, 10),
    "top_k": st.integers(0, (1 << 31) - 1), "seed": st.integers(-(1 << 63), (1 << 63) - 1),
    "logprobs": st.integers(0, 20), "min_tokens": st.integers(0, (1 << 31) - 1),
    "logit_bias": st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100), max_size=3),
}  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_what_is_refused_says_so(fields: dict[str, object]) -> None:
    """A value of any size gives a RequestError of one line, or none, and nothing else."""
    request = Request(id="a", prompt=[3], params=SamplingParams(**fields))  # type: ignore[arg-type]
    try:
        ADMISSION.check(request)
        refusal = ""
    except RequestError as error:
        refusal = str(error)
    assert len(refusal) < 200 and "\n" not in refusal


@settings(max_examples=600, deadline=None)
@given(
    st.fixed_dictionaries({}, optional=EDGES),
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=VOCABULARY, max_size=VOCABULARY),
)
def test_what_passes_the_checks_can_be_sampled(
    fields: dict[str, object], logits: list[float]
) -> None:
    request = Request(id="a", prompt=[3, 4], params=SamplingParams(**fields))  # type: ignore[arg-type]
    ADMISSION.check(request)
    state = SamplingState(request.params, [3, 4, 5], 2, VOCABULARY)
    state.push(5)
    values = np.array(logits, np.float32)
    token, logprob, _, others = _native.sample("", values, state.row())
    assert 0 <= token < VOCABULARY and not any(math.isnan(x) for x in (logprob, *others))


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-40, 1e-30, 1e-6])
@pytest.mark.parametrize(
    "limit",
    [
        {},
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"typical_p": 0.5},
        {"logit_bias": {1: 1.0}},
    ],
    ids=str,
)
def test_hardly_any_temperature_is_none(temperature: float, limit: dict[str, Any]) -> None:
    logits = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    params = SamplingParams(temperature=temperature, seed=1, **limit)
    state = SamplingState(params, [3], 1, 1000)
    for measured in (False, True):
        token = _native.sample("", logits, state.row(), measured)[0]
        assert token == logits.argmax()


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = tmp_path_factory.mktemp("model")
    save_hf(Small(), folder)
    return Runner(folder, tokens=16, blocks=4)


def ints(*values: object) -> np.ndarray:
    return np.array(values, np.int32)


ROW = np.ones((1, 64), np.float32)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": ints(1, 320, 2)}, {"ids": ints(1, -1, 2)}, {"positions": ints(0, 1)}, {"positions": ints(0, -1, 2)},
        {"spans": [Span(0, 4, 0, 0, -1)]}, {"spans": [Span(1, 3, 0, 0, -1)]}, {"spans": [Span(-1, 3, 0, 0, -1)]},
        {"spans": [Span(0, 0, 0, 0, -1)]}, {"spans": [Span(0, 3, -1, 0, -1)]}, {"spans": [Span(0, 3, 0, 1, -1)]},
        {"spans": [Span(0, 3, 0, -1, -1)]}, {"spans": [Span(0, 3, 14, 0, -1)]}, {"spans": [Span(0, 3, (1 << 31) - 2, 0, -1)]},
        {"spans": [Span(0, 3, 0, 0, 0)]}, {"block_tables": ints(4)}, {"block_tables": ints(-1)}, {"block_tables": ints()}, {"logits_indices": ints(3)},
        {"positions": ints(0, 1, 2, 3)}, {"spans": [Span(0, 2, 0, 0, -1)]}, {"spans": [Span(0, 1, 0, 0, -1), Span(2, 1, 0, 0, -1)]},
        {"spans": [Span(0, 2, 0, 0, -1), Span(1, 2, 0, 0, -1)]}, {"spans": []},
        {"embeddings": ROW, "embedding_rows": ints(3)}, {"embeddings": ROW, "embedding_rows": ints(-1)}, {"embeddings": ROW},
        {"embedding_rows": ints(0)}, {"embeddings": ROW, "embedding_rows": ints(0, 1)}, {"embeddings": ROW[:, :63], "embedding_rows": ints(0)},
        {"embeddings": np.zeros((1, 65), np.float32), "embedding_rows": ints(0)}, {"embeddings": ROW * np.inf, "embedding_rows": ints(0)},
        {"embeddings": ROW * np.nan, "embedding_rows": ints(0)}, {"embeddings": np.tile(ROW, (2, 1)), "embedding_rows": ints(1, 1)},
        {"embeddings": np.tile(ROW, (2, 1)), "embedding_rows": ints(1, 0)}, {"kv_writes": ints([3, 0])}, {"kv_writes": ints([-1, 0])},
        {"kv_writes": ints([0, 1])}, {"kv_writes": ints([0, -1])}, {"kv_writes": ints([0, (1 << 31) - 1])}, {"kv_writes": ints([0, 0, 0])},
        {"kv_writes": ints([0, 1]), "block_tables": ints(0, 4)}, {"kv_writes": ints([0, 1]), "block_tables": ints(0, -1)},
        {"logits_indices": ints(-1)}, {"ids": ints(*[1] * 17), "positions": ints(*range(17))}, {"token_type_ids": ints(0)},
    ],
    ids=str,
)  # fmt: skip
def test_steps_that_point_outside_are_refused(runner: Runner, wrong: dict[str, np.ndarray]) -> None:
    good = StepInput(
        ints(1, 5, 2), ints(0, 1, 2), [Span(0, 3, 0, 0, -1)], ints(0), ints(2), all_logits=True
    )
    runner.executable.step(good)
    expected = runner.executable.logits(1)
    with pytest.raises((ValueError, IndexError)):
        runner.executable.step(replace(good, **wrong))
    runner.executable.step(good)
    assert (runner.executable.logits(1) == expected).all()


@pytest.mark.parametrize(
    ("first", "count"), [(-1, 1), (0, -1), (0, 1 << 20), (1 << 30, 1), ((1 << 31) - 1, 1), (-9, 20)]
)
def test_results_outside_their_buffer_are_refused(runner: Runner, first: int, count: int) -> None:
    """And with those of the last row there is none more; a model that only counts has none."""
    model, rows = runner.executable.model, runner.executable.limits.selected
    output = runner.executable._output
    with pytest.raises(IndexError):
        model.rows(output, first, count)
    assert model.rows(output, rows, 0).shape == (0, model.rows(output, 0, rows).shape[1])
    with pytest.raises(IndexError):
        model.rows(output, rows, 1)
    with pytest.raises(IndexError):
        model.rows(1 << 20, 0, 1)
    counting = _native.Model(_native.isa(), 1, 4, 4)
    with pytest.raises(IndexError):
        counting.rows(counting.add_buffer(False, 8), 0, 1)


def test_positions_do_not_say_where_keys_lie(tmp_path: Path) -> None:
    """Rotations are relative: positions far outside the block table change nothing but rounding,
    and nothing outside of it is written."""
    save_hf(Small(), tmp_path)
    runner = Runner(tmp_path, tokens=16, blocks=4, kv_dtype="f32")
    step = StepInput(ints(1, 5, 2), ints(0, 1, 2), [Span(0, 3, 0, 0, -1)], ints(0), ints(0, 1, 2))
    runner.executable.step(step)
    expected = runner.executable.logits(3)
    for first in (100, 5000):
        runner.executable.step(replace(step, positions=step.positions + np.int32(first)))
        assert np.abs(runner.executable.logits(3) - expected).max() < 2e-3
    runner.executable.step(step)
    assert (runner.executable.logits(3) == expected).all()


def test_steps_in_a_row_take_tokens_only(runner: Runner) -> None:
    """What several steps draw has no embeddings and no other branches."""
    sampled = [SamplingRow()]
    step = StepInput(ints(1), ints(0), [Span(0, 1, 0, 0, -1)], ints(0), ints(0), sampled)
    assert len(runner.executable.decode(step, 3, [[]])) == 3
    for more in ({"embeddings": ROW, "embedding_rows": ints(0)}, {"kv_writes": ints([0, 0])}):
        with pytest.raises(ValueError, match="single tokens"):
            runner.executable.decode(replace(step, **more), 3, [[]])


def test_fields_are_read_by_name(runner: Runner) -> None:
    """In whatever order a tuple has them; one that is missing or of another type is refused."""
    logits = np.arange(10, dtype=np.float32)
    row = SamplingRow(target=3, logprobs=0, position=7)
    turned = namedtuple("turned", reversed(SamplingRow._fields))  # type: ignore[misc]
    assert _native.sample("", logits, turned(**row._asdict())) == _native.sample("", logits, row)
    with pytest.raises(TypeError, match="top_k is of the wrong type"):
        _native.sample("", logits, row._replace(top_k="3"))  # type: ignore[arg-type]
    less = namedtuple("less", SamplingRow._fields[1:])  # type: ignore[misc]
    with pytest.raises(ValueError, match="not in tuple"):
        _native.sample("", logits, less(*row[1:]))
    with pytest.raises(TypeError, match="heads_: no such field"):
        _native.Attention(heads_=1)  # type: ignore[call-arg]
    span = [(0, 3, 0, 0, -1)]
    with pytest.raises(TypeError, match="not a named tuple"):
        runner.executable.step(StepInput(ints(1, 5, 2), ints(0, 1, 2), span, ints(0), ints(2)))  # type: ignore[arg-type]
