"""Tokens and log-probabilities depend on the request alone, through the engine, by ==."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.backends.base import SamplingRow, Span, StepInput
from octavo.backends.cuda.executable import following
from octavo.engine.engine import Engine
from tests.cuda.gpu import on_host
from tests.cuda.loaded import load, logits, open_program, prompt
from tests.families import FAMILIES, save_family
from tests.property.test_exact import Output, drive, some_requests
from tests.small_models import Small, save_hf


class Model:
    """An executable, used by one engine after the other."""

    def __init__(self, path: Path) -> None:
        self.program = open_program(path)
        self.executable = load(self.program, path, tokens=64, blocks=60)

    def engine(self, **options: Any) -> Engine:
        p = self.program
        return Engine(self.executable, p.vocabulary, p.context, frozenset({2}), **options)


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt-oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    if request.param == "gpt-oss":
        save_family(FAMILIES["gpt-oss"], folder)
    else:
        save_hf(Small(family=request.param, layers=2, window=20), folder)
    with pytest.MonkeyPatch.context() as patch:
        on_host(patch)
        return Model(folder)


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_but_the_request_matters(model: Model, seed: int, host: None) -> None:
    """Alone and step by step; together, in other chunks, from the prefix cache, preempted, several
    steps a call."""
    requests = some_requests(seed, 4, 320, 60, 80)
    expected: dict[str, Output] = {}
    for r in requests:
        expected |= drive(model.engine(prefix_caching=False, multi_step=0.0), [r])
    rng = random.Random(seed)
    engine = model.engine(budget=rng.choice([5, 16, 33]), multi_step=10.0)
    assert drive(engine, requests[::-1], rng) == expected
    assert drive(engine, requests, rng) == expected  # with what the cache now holds


def test_steps_in_a_row(model: Model, host: None) -> None:
    """Several steps on the device draw what steps one by one draw, and stop where one has ended."""
    executable, rng = model.executable, np.random.default_rng(8)
    prompts = [rng.integers(3, 320, n).tolist() for n in (5, 20, 33)]

    def decoding() -> StepInput:
        for i, ids in enumerate(prompts):
            step = prompt(ids)
            executable.step(replace(step, block_tables=step.block_tables + 4 * i))
        spans = [Span(i, 1, len(ids), 4 * i) for i, ids in enumerate(prompts)]
        at = np.array([len(ids) for ids in prompts], np.int32)
        rows = np.arange(3, dtype=np.int32)
        tables = np.arange(12, dtype=np.int32)
        return StepInput(rows + 7, at, spans, tables, rows, [SamplingRow()] * 3)

    step, expected = decoding(), []
    for _ in range(12):
        expected.append(executable.step(step))
        step = following(step, [s.token for s in expected[-1]])
    assert executable.decode(decoding(), 12, [[], [], []]) == expected
    assert len({s.token for row in expected for s in row}) > 1
    end = expected[4][1].token
    first = next(i for i, row in enumerate(expected) if row[1].token == end)
    assert executable.decode(decoding(), 12, [[], [end], []]) == expected[: first + 1]


@pytest.mark.parametrize("cuts", [(1,), (7, 16, 17), (64,), (33, 31)])
def test_logits_do_not_depend_on_chunks(model: Model, cuts: tuple[int, ...], host: None) -> None:
    ids = np.random.default_rng(5).integers(3, 320, 80).tolist()
    whole = np.concatenate([logits(model.executable, [t], i) for i, t in enumerate(ids)])
    found, at = [], 0
    while at < len(ids):
        size = cuts[len(found) % len(cuts)]
        found.append(logits(model.executable, ids[at : at + size], at))
        at += size
    assert np.array_equal(np.concatenate(found), whole)
