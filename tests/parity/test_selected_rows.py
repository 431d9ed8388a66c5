"""Rows that are not selected leave the last layer early, and change nothing but what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from octavo.backends.base import BLOCK, Span, StepInput
from octavo.backends.selection import select_early
from octavo.program import Attention, SelectRows
from tests.conftest import Runner
from tests.families import FAMILIES, VOCABULARY, save_family, save_gguf

EARLY = ["llama-odd", "gemma2", "gemma3", "phi", "gpt2", "opt-350m", "olmo2", "starcoder2"]
LATE = ["mixtral", "gpt-oss"]  # experts need all rows
COUNTS = (40, 1, 5)  # of sequences in one step: a prompt, one that decodes, a short chunk
CACHED = 20  # tokens of each before it
BLOCKS = 8  # of a sequence
SELECTIONS = [[39], [], [40], [39, 40, 45], [45, 39, 39], [0, 20, 38, 39, 41, 44]]


def _step(runner: Runner, start: int, counts: Sequence[int], selected: Sequence[int]) -> np.ndarray:
    """Logits of the selected rows of a step in which each sequence has so many tokens."""
    rng = np.random.default_rng(start)
    spans, first = [], 0
    for i, count in enumerate(counts):
        spans.append(Span(first, count, start, i * BLOCKS))
        first += count
    positions = [np.arange(start, start + count, dtype=np.int32) for count in counts]
    runner.executable.step(
        StepInput(
            rng.integers(3, VOCABULARY, first).astype(np.int32),
            np.concatenate(positions),
            spans,
            np.arange(BLOCKS * len(counts), dtype=np.int32),
            np.array(selected, np.int32),
        )  # fmt: skip
    )
    return runner.executable.logits(len(selected))


def _check(runner: Runner) -> None:
    """Of a step and the one after it, whichever rows of the first were selected."""
    rows, behind = range(sum(COUNTS)), CACHED + max(COUNTS)
    assert behind < BLOCKS * BLOCK

    def run(selected: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        _step(runner, 0, [behind] * len(COUNTS), [])  # fills what no other step is to read
        _step(runner, 0, [CACHED] * len(COUNTS), [])
        return _step(runner, CACHED, COUNTS, selected), _step(runner, behind, [1, 1, 1], range(3))

    every, after = run(rows)
    assert len(np.unique(every, axis=0)) == len(rows)
    for selected in SELECTIONS:
        some, then = run(selected)
        assert np.array_equal(some, every[selected])
        assert np.array_equal(then, after)


@pytest.mark.parametrize("name", [*EARLY, *LATE])
def test_same_bits(name: str, tmp_path: Path) -> None:
    save_family(FAMILIES[name], tmp_path)
    runner = Runner(tmp_path)
    program, early = select_early(runner.program)
    assert bool(early) == (name in EARLY)
    assert (program is runner.program) == (name in LATE)
    _check(runner)


@pytest.mark.parametrize("activations", ["auto", "int16"])
def test_same_bits_of_quantized_layers(activations: str, tmp_path: Path) -> None:
    save_family(FAMILIES["llama"], tmp_path)
    path = tmp_path / "model.gguf"
    save_gguf(FAMILIES["llama"], tmp_path, path, Q.Q4_0)
    _check(Runner(path, activations=activations))


@pytest.mark.parametrize("name", EARLY)
def test_what_is_selected(name: str, tmp_path: Path) -> None:
    """All that follows the last attention is of selected rows, and nothing before it."""
    save_family(FAMILIES[name], tmp_path)
    ops = select_early(Runner(tmp_path).program)[0].ops
    last = max(i for i, op in enumerate(ops) if isinstance(op, Attention))
    assert all(isinstance(op, SelectRows) for op in ops[:last] if op.out.selected)
    assert all(op.out.selected for op in ops[last + 1 :])
    assert len({op.out.id for op in ops}) == len(ops)
