"""Scales folded into models: the same logits, and only where it is possible."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.backends.torch.reference import Reference
from octavo.checkpoint import Checkpoint, Tensor
from octavo.checkpoint.open import open_checkpoint
from octavo.compress.awq import best_scales
from octavo.compress.folding import input_groups
from octavo.compress.grids import Grid
from octavo.compress.groups import whole
from octavo.compress.scaled import find_scales, folded
from octavo.models import build_program
from octavo.program import Linear, Program, Route
from tests.families import FAMILIES, save_family

IDS = [int(i) for i in np.random.default_rng(3).integers(0, 250, 48)]


def opened(family: str, folder: Path) -> tuple[Checkpoint, Program, dict[str, Tensor]]:
    save_family(FAMILIES[family], folder)
    checkpoint = open_checkpoint(folder)
    program = build_program(checkpoint)
    routers = {op.x for op in program.ops if isinstance(op, Route)}
    linear = [op for op in program.ops if isinstance(op, Linear) and op.out != program.output]
    names = {whole(op.weight.tensor)[0] for op in linear if op.out not in routers}
    return checkpoint, program, {n: checkpoint.tensors[n] for n in names}


# Inputs of layers that scales can be folded into, of how many: not what norms of a block's end, an
# uneven activation or a router's norm make, and not transposed matrices' producers either way.
FOLDABLE = {
    "llama": 12, "llama-odd": 12, "phi3": 12, "gemma3": 28, "opt": 12, "qwen3-moe-mixed": 8,
    "mixtral": 6, "olmo2": 6, "phi": 6, "starcoder2": 9, "gpt-oss": 6,
}  # fmt: skip


@pytest.mark.parametrize("family", FOLDABLE)
def test_folding_keeps_logits(family: str, tmp_path: Path) -> None:
    checkpoint, program, wanted = opened(family, tmp_path)
    rng = np.random.default_rng(5)

    def search(weights, inputs, foldable):  # type: ignore[no-untyped-def]
        assert all(w.shape[1] == inputs.width for w in weights) and inputs.tokens == len(IDS)
        return foldable(np.exp(rng.standard_normal(inputs.width)).astype(np.float32))

    tokens = np.array([IDS], np.int32)
    scales = find_scales(program, wanted, tokens, tmp_path, search)
    assert len(scales) == FOLDABLE[family]
    after = build_program(folded(checkpoint, program, wanted, scales))
    expected, found = (Reference(p).logits(IDS) for p in (program, after))
    # fp32 through a few layers; a scale in the wrong place changes logits by their own size.
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_statistics_are_those_of_the_model_as_it_is(tmp_path: Path) -> None:
    """AWQ's search over a model: fewer, and all, of what can be folded is; twice the same."""
    checkpoint, program, wanted = opened("llama", tmp_path)
    tokens = np.array([IDS, IDS[::-1]], np.int32)

    def search(weights, inputs, foldable):  # type: ignore[no-untyped-def]
        hessian = inputs.gram.astype(np.float64) / inputs.tokens
        return best_scales(weights, inputs.mean_abs, hessian, Grid(4, 32), foldable)[1]

    first, again = (find_scales(program, wanted, tokens, tmp_path, search) for _ in range(2))
    assert first.keys() == again.keys() and 0 < len(first) <= 12
    assert all((first[i] == again[i]).all() for i in first)
    unchanged = folded(checkpoint, program, wanted, {})
    assert unchanged.tensors == checkpoint.tensors
    some = dict(list(wanted.items())[:1])
    assert find_scales(program, some, tokens, tmp_path, search).keys() <= first.keys()
    assert len([g for g in input_groups(program) if g.producer]) == 12
