"""Families and formats behind the CUDA lowering, on the CPU, against the reference.

Without rounding to bf16 what is left of a difference is fp32 arithmetic: mistakes show. With it the
gates are those of the CPU's kernels: KL divergence, and the likeliest token where it is likelier
than the next by more than rounding explains. Rows take the experts there that they take without it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q

from octavo.backends.cuda.probe import HOST
from octavo.backends.torch.reference import Reference
from octavo.checkpoint import open_checkpoint
from octavo.engine.encoder import CompiledEncoder
from octavo.models import build_vision
from octavo.program import Program
from tests.cuda.gpu import GPU
from tests.cuda.loaded import load, logits, open_program, without_rounding
from tests.cuda.routing import Routing
from tests.families import FAMILIES, VOCABULARY, save_family
from tests.parity.test_vision import encoded_logits, given_images, prompts, reference_embeddings
from tests.quantized_models import WRITERS, quantize_folder
from tests.small_models import GGUF_TYPES, K_TYPES, Small, save_gguf
from tests.vision_models import VISION_FAMILIES

LENGTH = 70  # past every window
EXACT = 2e-4  # of the largest logit
KL = 2e-3
DECIDED = 0.05  # of the largest logit: rounding does not change the order of what is further apart


def tokens(length: int = LENGTH) -> list[int]:
    found: list[int] = np.random.default_rng(3).integers(3, VOCABULARY, length).tolist()
    return found


def computed(program: Program, path: Path, ids: list[int]) -> torch.Tensor:
    """Logits of a prompt that comes in two steps, of different padded sizes: each is called."""
    executable = load(program, path, tokens=64)
    cut = 2 * len(ids) // 3
    found = [logits(executable, ids[:cut]), logits(executable, ids[cut:], cut)]
    return torch.from_numpy(np.concatenate(found))


def check(program: Program, path: Path, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rounding, in torch; and with it."""
    expected, routing = Reference(program).logits(ids), Routing()
    with monkeypatch.context() as patch:
        patch.setenv(HOST, "torch")
        without_rounding(patch)
        routing.record(patch)
        check_exact(expected, computed(program, path, ids))
    routing.replay(monkeypatch)
    check_rounded(expected, computed(program, path, ids))


def check_exact(expected: torch.Tensor, got: torch.Tensor) -> None:
    difference = ((expected - got).abs().max() / expected.abs().max()).item()
    print(f"largest difference {difference:.1e}")
    assert difference <= EXACT


def check_rounded(expected: torch.Tensor, got: torch.Tensor) -> None:
    p, q = expected.log_softmax(-1), got.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean().item()
    best = expected.topk(2).values
    decided = best[:, 0] - best[:, 1] > DECIDED * expected.abs().max()
    same = (expected.argmax(-1) == got.argmax(-1)).double()
    print(
        f"KL {kl:.1e}, top-1 {same.mean():.3f}, of {decided.sum()} decided {same[decided].mean()}"
    )
    assert kl <= KL
    assert decided.sum() >= len(expected) // 10
    assert same[decided].mean() >= 0.99


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, host: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_family(FAMILIES[name], tmp_path)
    program = open_program(tmp_path)
    check(program, tmp_path, tokens(), monkeypatch)


@pytest.mark.parametrize("kind", [*GGUF_TYPES, *K_TYPES], ids=lambda q: q.name)
def test_gguf_types(kind: Q, host: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    save_gguf(Small(heads=4, kv_heads=2, head_dim=64, hidden=256, ffn=512, layers=2), path, kind)
    program = open_program(path)
    check(program, path, tokens(40), monkeypatch)


@pytest.mark.parametrize("format", WRITERS)
def test_quantized_folders(
    format: str, host: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    family = FAMILIES["llama"]
    save_family(type(family)(family.model_type, family.settings | settings, family.arch), tmp_path)
    quantize_folder(tmp_path, WRITERS[format], lambda name: "proj" in name)
    program = open_program(tmp_path)
    check(program, tmp_path, tokens(40), monkeypatch)


@pytest.mark.parametrize("name", sorted(VISION_FAMILIES))
def test_images(name: str, host: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Towers, projectors and prompts with images, as the engine computes them."""
    family = VISION_FAMILIES[name]
    family.save(tmp_path)
    if not GPU:
        without_rounding(monkeypatch)
    checkpoint = open_checkpoint(tmp_path)
    program, vision = open_program(tmp_path), build_vision(checkpoint)
    assert vision is not None
    encoder = CompiledEncoder.of(vision, device="cuda:0").load(checkpoint, 1, lambda _: None)
    ids, seeds, offsets = prompts(family)[2]
    images, given = [family.image(seed) for seed in seeds], {}
    for image, offset in zip(images, offsets, strict=True):
        rows = reference_embeddings(vision, image)
        given |= {offset + i: row for i, row in enumerate(rows)}
    reach, places = given_images(vision, ids, images, offsets)
    more = {} if places is None else {"coordinates": places}
    expected = Reference(program).logits(ids, embeddings=given, reach=reach.tolist(), **more)
    executable = load(program, tmp_path, tokens=512, blocks=64)
    got = encoded_logits(executable, encoder, ids, images, offsets)
    (check_rounded if GPU else check_exact)(expected, torch.from_numpy(got))
