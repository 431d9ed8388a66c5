"""Rows that are not selected leave the last layer early, and change nothing but what it costs: bits
are those of the program as it is given, which adapters have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from octavo.backends.base import (
    BLOCK,
    Executable,
    ProgramOptions,
    SamplingRow,
    Span,
    StepInput,
    StepLimits,
)
from octavo.backends.cpu.activations import resolve
from octavo.backends.cpu.executor import host_isa, load
from octavo.backends.cpu.lower import lower
from octavo.backends.selection import select_early
from octavo.checkpoint import open_checkpoint
from octavo.models import build_program
from octavo.program import Attention, SelectRows
from tests.families import FAMILIES, VOCABULARY, save_family, save_gguf

EARLY = ["llama-odd", "gemma2", "gemma3", "phi", "gpt2", "opt-350m", "olmo2", "starcoder2"]
LATE = ["mixtral", "gpt-oss"]  # experts need all rows
CACHED = 280  # tokens before the step: more than one chunk of attention
BLOCKS = 22  # of a sequence
STEPS = {  # tokens of each sequence in a step: rows that are selected of it
    # a prompt, one that decodes, a short chunk
    (40, 1, 5): [[39], [], [40], [39, 40, 45], [45, 39, 39], [0, 20, 38, 39, 41, 44]],
    (1, 1, 1): [[1], [], [0, 2], [2, 2, 2]],  # whose keys are split among threads
    (3, 1, 2): [[2], [0, 5], [3, 4]],
}


def _executable(path: Path, adapters: bool, activations: str) -> Executable:
    program = build_program(open_checkpoint(path))
    options = ProgramOptions(
        StepLimits(1024, 64, 128), 2, "bf16", activations=resolve(activations, program, host_isa())
    )
    return load(lower(program, adapters), options)


def _step(
    executable: Executable, start: int, counts: Sequence[int], selected: Sequence[int]
) -> np.ndarray:
    """Logits of the selected rows of a step in which each sequence has so many tokens."""
    rng = np.random.default_rng(start)
    spans, first = [], 0
    for i, count in enumerate(counts):
        spans.append(Span(first, count, start, i * BLOCKS))
        first += count
    positions = [np.arange(start, start + count, dtype=np.int32) for count in counts]
    executable.step(
        StepInput(
            rng.integers(3, VOCABULARY, first).astype(np.int32),
            np.concatenate(positions),
            spans,
            np.arange(BLOCKS * len(counts), dtype=np.int32),
            np.array(selected, np.int32),
        )  # fmt: skip
    )
    return executable.logits(len(selected))


def _check(path: Path, activations: str = "int16") -> None:
    """Logits of steps, and of those after them, are the given program's, whichever rows of the first
    were selected."""
    late, early = (_executable(path, adapters, activations) for adapters in (True, False))

    def run(executable: Executable, counts: Sequence[int], selected: Sequence[int]) -> list:
        behind = CACHED + max(counts)
        assert behind < BLOCKS * BLOCK
        _step(executable, 0, [behind] * 3, [])  # fills what no other step is to read
        _step(executable, 0, [CACHED] * 3, [])
        rows = _step(executable, CACHED, counts, selected)
        return [rows, _step(executable, behind, [1, 1, 1], range(3))]

    for counts, selections in STEPS.items():
        every, after = run(late, counts, range(sum(counts)))
        assert len(np.unique(every, axis=0)) == len(every)
        for selected in selections:
            some, then = run(early, counts, selected)
            assert np.array_equal(some, every[selected])
            assert np.array_equal(then, after)


@pytest.mark.parametrize("name", [*EARLY, *LATE])
def test_same_bits(name: str, tmp_path: Path) -> None:
    save_family(FAMILIES[name], tmp_path)
    assert bool(select_early(build_program(open_checkpoint(tmp_path)))[1]) == (name in EARLY)
    _check(tmp_path)


@pytest.mark.parametrize("activations", ["auto", "int8", "int16"])
def test_same_bits_of_quantized_layers(activations: str, tmp_path: Path) -> None:
    save_family(FAMILIES["llama"], tmp_path)
    path = tmp_path / "model.gguf"
    save_gguf(FAMILIES["llama"], tmp_path, path, Q.Q4_0)
    _check(path, activations)


def test_the_head_is_known_from_layers_as_wide(tmp_path: Path) -> None:
    """The head leaves out panels of tokens that cannot be drawn; the last layer may not."""
    family = FAMILIES["llama"]
    settings = family.settings | {"hidden_size": VOCABULARY}
    save_family(replace(family, settings=settings), tmp_path)
    mask = b"\xf0" + bytes(VOCABULARY // 8 - 1)  # tokens 4 to 7
    found = []
    for adapters in (True, False):
        executable = _executable(tmp_path, adapters, "int16")
        ids = np.arange(3, 43, dtype=np.int32)
        rows = np.arange(len(ids), dtype=np.int32)
        step = StepInput(
            ids, rows, [Span(0, len(ids), 0, 0)], rows[:3], rows[-1:],
            [SamplingRow(mask=mask)], all_logits=False,
        )  # fmt: skip
        (sample,) = executable.step(step)
        found.append((sample.token, executable.logits(1)[0, 4:8].tolist()))
    assert found[0] == found[1] and 4 <= found[0][0] < 8


@pytest.mark.parametrize("name", EARLY)
def test_what_is_selected(name: str, tmp_path: Path) -> None:
    """All that follows the last attention is of selected rows, and nothing before it."""
    save_family(FAMILIES[name], tmp_path)
    given = build_program(open_checkpoint(tmp_path))
    program, early = select_early(given)
    (select,) = (op for op in given.ops if isinstance(op, SelectRows))
    assert select.x.id not in early  # what reads it is the head, or before that
    ops = program.ops
    last = max(i for i, op in enumerate(ops) if isinstance(op, Attention))
    assert all(isinstance(op, SelectRows) for op in ops[:last] if op.out.selected)
    assert all(op.out.selected for op in ops[last + 1 :])
    assert len({op.out.id for op in ops}) == len(ops)
