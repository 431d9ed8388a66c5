"""What is planned is what is allocated; launches depend on padded sizes alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q

from octavo.backends.base import ProgramOptions, Span, StepInput, StepLimits, tree_spans
from octavo.backends.cuda import constants
from octavo.backends.cuda.backend import CudaBackend
from octavo.backends.cuda.inputs import StepSize, step_size
from octavo.backends.cuda.launches import UnpackedRef
from octavo.backends.cuda.memory import DeviceMemory
from octavo.backends.cuda.placed import Placed
from tests.cuda.loaded import load, logits, open_program, prompt
from tests.families import FAMILIES, save_family
from tests.small_models import Small, save_gguf

SHAPES = [(1, 64), (64, 64), (320, 72), (4096, 4096), (28672, 4096), (128_256, 4096), (4096, 14336)]


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "gemma3", "qwen3-moe", "gpt2"])
def test_footprint_is_what_load_allocates(name: str, host: None, tmp_path: Path) -> None:
    save_family(FAMILIES[name], tmp_path)
    program = open_program(tmp_path)
    compiled = CudaBackend().compile(program)
    for limits in (StepLimits(40, 8, 20), StepLimits(512, 256, 33)):
        options = ProgramOptions(limits, 1, "bf16", activations="bf16")
        placed = Placed(
            DeviceMemory(compiled.launches, limits), torch.device("cpu"), lambda _: None
        )
        planned = compiled.footprint(options)
        assert (planned.weights, planned.buffers, planned.cache) == placed.nbytes
        assert placed.nbytes[2] == limits.blocks * compiled.block_bytes("bf16")


def test_room_for_unpacked_codes(host: None, tmp_path: Path) -> None:
    """One place for all matrices that multiply every row, where steps can have that many; what it
    is used for changes no bit."""
    path = tmp_path / "m.gguf"
    save_gguf(Small(heads=4, kv_heads=2, head_dim=16, layers=1), path, Q.Q4_0)
    program = open_program(path)
    few, many = (load(program, path, tokens=n).placed for n in (192, 512))
    refs = [a for c in few.memory.launches.launches for a in c.args if isinstance(a, UnpackedRef)]
    shapes = [few.memory.shape(ref) for ref in refs]
    assert len(shapes) == 4  # not of the head, which multiplies selected rows
    largest = max(n * k for n, k in shapes)
    assert (few.memory.unpacked.nbytes, many.memory.unpacked.nbytes) == (0, 2 * largest)
    for placed in (few, many):
        footprint = placed.memory.footprint
        assert placed.nbytes == (footprint.weights, footprint.buffers, footprint.cache)

    def given(placed: Placed, rows: int) -> list[bool]:
        calls = placed.calls(StepSize(rows, 8, 0))
        linear = [c for c in calls if getattr(c, "func", _none).__name__ == "linear"]
        return [c.args[3] is not None for c in linear]  # type: ignore[attr-defined]

    assert given(few, 192) == given(many, 192) == [False] * 5
    assert given(many, 256) == [True] * 4 + [False]


def _none() -> None:
    pass


def test_long_prompts_have_the_bits_of_short_ones(host: None, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    save_gguf(Small(heads=4, kv_heads=2, head_dim=16, layers=1), path, Q.Q4_0)
    executable = load(open_program(path), path, tokens=512, blocks=32)
    ids = np.random.default_rng(3).integers(3, 320, 400).tolist()
    whole = logits(executable, ids)
    parts = [logits(executable, ids[at : at + 100], at) for at in range(0, 400, 100)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_launches_do_not_depend_on_lengths(host: None, tmp_path: Path) -> None:
    """One list for every step of a padded size: the same functions with the same memory."""
    save_family(FAMILIES["gpt-oss"], tmp_path)
    executable = load(open_program(tmp_path), tmp_path)
    rng = np.random.default_rng(2)
    lists = []
    for count, start in ((5, 0), (8, 100), (6, 37)):
        step = prompt(rng.integers(3, 320, count).tolist(), start)
        executable.step(step)
        assert step_size(step) == StepSize(8, 8, 0)
        lists.append(executable.calls(step_size(step)))
    assert lists[0] is lists[1] is lists[2]
    again = executable.placed.calls(StepSize(8, 8, 0))

    def described(call: object) -> object:
        f, args = call.func, call.args  # type: ignore[attr-defined]
        where = [a.data_ptr() if isinstance(a, torch.Tensor) else None for a in args]
        return f, where, call.keywords  # type: ignore[attr-defined]

    partials = [c for c in lists[0] if hasattr(c, "func")]
    assert [described(c) for c in partials] == [described(c) for c in again if hasattr(c, "func")]
    assert len(partials) > 30


@pytest.mark.parametrize(("kind", "multiple"), [("bf16", 64), ("int4", 128), ("fp8", 128)])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_slices_depend_on_the_weight_alone(n: int, k: int, kind: str, multiple: int) -> None:
    width, count = constants.slice_width(kind, n, k), constants.slices(kind, n, k)
    assert width % multiple == 0
    assert (count - 1) * width < constants.up(k) <= count * width
    assert 256 <= width <= 4096
    busy = -(-n // constants.TILE) * count
    assert busy >= 256 or width == 256  # as many programs as keep the device busy, or narrowest


def test_a_tree_is_its_paths(host: None, tmp_path: Path) -> None:
    """Branches share rows; each row's logits are those of its path as a plain sequence."""
    save_family(FAMILIES["llama"], tmp_path)
    executable = load(open_program(tmp_path), tmp_path)
    ids = np.random.default_rng(9).integers(3, 320, 26).tolist()
    stem, tree, parents = ids[:20], ids[20:], [-1, 0, 1, 0, 3, -1]
    expected = []
    for node in range(len(tree)):
        path, at = [tree[node]], parents[node]
        while at >= 0:
            path, at = [tree[at], *path], parents[at]
        executable.step(prompt(stem + path))
        expected.append(executable.logits(len(stem) + len(path))[-1])
    executable.step(prompt(stem))
    tables = [0, 2, 4]  # blocks 0, 1; then 0 with another second block each
    blocks = [0, 1, 0, 2, 0, 3]
    for own in (2, 3):
        executable.copy_block(1, own)
    spans, writes = tree_spans(parents, 0, len(stem), tables)
    depth = [0, 1, 2, 1, 2, 0]
    step = StepInput(
        np.array(tree, np.int32), np.array(depth, np.int32) + len(stem), spans,
        np.array(blocks, np.int32), np.arange(len(tree), dtype=np.int32),
        kv_writes=np.array(writes, np.int32),
    )  # fmt: skip
    assert all(isinstance(span, Span) for span in spans)
    executable.step(step)
    assert np.array_equal(executable.logits(len(tree)), np.array(expected))
