"""Every family from safetensors and from GGUF: the reference against transformers, then the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q

from octavo.backends.torch.reference import Reference
from octavo.checkpoint import open_checkpoint
from octavo.models import build_program
from tests.conftest import Runner
from tests.families import COMMON, FAMILIES, VOCABULARY, Family, save_family, save_gguf
from tests.parity.test_cpu import Divergence
from tests.parity.test_reference import LIMIT

IN_GGUF = [name for name, family in FAMILIES.items() if family.arch]
LENGTH = 300  # past every window, and past the contexts that rotations were first made for


def _ids(seed: int, length: int = LENGTH) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()


def _expected(oracle: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return oracle(torch.tensor([ids])).logits[0]


def _check_reference(oracle: torch.nn.Module, path: Path, context: int | None = None) -> None:
    reference = Reference(build_program(open_checkpoint(path), context))
    ids = _ids(3, min(LENGTH, context or LENGTH))
    difference = (_expected(oracle, ids) - reference.logits(ids)).abs().max().item()
    print(f"largest difference {difference:.1e}")
    assert difference <= LIMIT


def _check_cpu(path: Path) -> None:
    runner = Runner(path)
    reference, d = Reference(runner.program), Divergence()
    for seed in range(6):
        ids = _ids(seed, 500)
        d.add(reference.logits(ids), runner.logits(ids), ids)
    d.check()


@pytest.mark.parametrize("name", FAMILIES)
def test_safetensors(name: str, tmp_path: Path) -> None:
    _check_reference(save_family(FAMILIES[name], tmp_path), tmp_path)
    _check_cpu(tmp_path)


@pytest.mark.parametrize("name", IN_GGUF)
def test_gguf(name: str, tmp_path: Path) -> None:
    oracle = save_family(FAMILIES[name], tmp_path)
    path = tmp_path / "model.gguf"
    save_gguf(FAMILIES[name], tmp_path, path)
    _check_reference(oracle, path)
    save_gguf(FAMILIES[name], tmp_path, path, Q.Q8_0)
    _check_cpu(path)


def test_longrope_short_context(tmp_path: Path) -> None:
    """A context that the model was first made for takes the short list, as transformers does."""
    family = FAMILIES["phi3-longrope"]
    oracle = save_family(family, tmp_path)
    save_gguf(family, tmp_path, tmp_path / "model.gguf")
    _check_reference(oracle, tmp_path, 64)
    _check_reference(oracle, tmp_path / "model.gguf", 64)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "olmoe"])
def test_routing(name: str, tmp_path: Path) -> None:
    """The experts a token goes to, and how much each counts, are transformers'."""
    from octavo.program import Route

    family: Family = FAMILIES[name]
    oracle = save_family(family, tmp_path)
    program = build_program(open_checkpoint(tmp_path))
    routes = [op for op in program.ops if isinstance(op, Route)]
    seen: list[torch.Tensor] = []

    class Watching(Reference):
        def run(self, op, *rest):  # type: ignore[no-untyped-def]
            out = super().run(op, *rest)
            if isinstance(op, Route):
                seen.append(out)
            return out

    ids = _ids(5)
    Watching(program).logits(ids)
    with torch.inference_mode():
        logits = oracle(torch.tensor([ids]), output_router_logits=True).router_logits
    assert len(seen) == len(logits) == len(routes)
    for ours, theirs, op in zip(seen, logits, routes, strict=True):
        weights, chosen = theirs.softmax(-1).topk(op.top_k, dim=-1)
        if op.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        expected = torch.zeros_like(theirs).scatter(1, chosen, weights)
        assert torch.equal(ours > 0, expected > 0)
        assert (ours - expected).abs().max() <= 1e-5


def test_only_chosen_experts_are_read(tmp_path: Path) -> None:
    """What a step of one token reads of the experts' weights is top_k of them in every layer."""
    from octavo import _native

    save_family(FAMILIES["qwen3-moe"], tmp_path)
    runner = Runner(tmp_path)
    shape = COMMON["num_hidden_layers"], 48, COMMON["hidden_size"]
    layers, ffn, hidden = shape
    each = 2 * _native.matrix_bytes(0, 0, ffn, hidden) + _native.matrix_bytes(0, 0, hidden, ffn)
    before = runner.executable.model.expert_bytes
    runner.logits([7])
    assert runner.executable.model.expert_bytes - before == layers * 3 * each
    runner.logits(_ids(9, 200))  # of many tokens every expert has some
    assert runner.executable.model.expert_bytes - before == layers * (3 + 8) * each
