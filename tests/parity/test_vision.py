"""Models that take images, against transformers: the reference and the CPU backend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.backends.torch.reference import Reference
from octavo.checkpoint import open_checkpoint
from octavo.models import build_program, build_vision
from octavo.models.vision import VisionModel
from octavo.vision.image import ImageInput
from tests.vision_models import PLACEHOLDER, VISION_FAMILIES, VisionFamily

NAMES = sorted(VISION_FAMILIES)


def reference_embeddings(vision: VisionModel, image: ImageInput) -> torch.Tensor:
    def run(program, rows):  # type: ignore[no-untyped-def]
        given = dict(enumerate(torch.from_numpy(rows)))
        return Reference(program).logits([0] * len(rows), embeddings=given)

    states = run(vision.tower.program, vision.patches(image)).numpy()
    return run(vision.projector, np.ascontiguousarray(vision.merged(states)))


def prompts(family: VisionFamily) -> list[tuple[list[int], list[int]]]:
    """Token ids, and where images begin: none, one, several beside each other, one at the end."""
    one, rng = [PLACEHOLDER] * family.tokens, np.random.default_rng(2)
    text = [[int(i) for i in rng.integers(3, 290, n)] for n in (5, 9, 3)]
    a, b, c = text
    n = family.tokens
    apart = [298]  # between images, as every family's template has
    return [
        (a + b, []),
        (a + one + b, [5]),
        (a + one + apart + one + b, [5, 6 + n]),
        (c + one + a + one, [3, 8 + n]),
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.nn.Module]]:
    out = {}
    for name in NAMES:
        folder = tmp_path_factory.mktemp(name)
        out[name] = folder, VISION_FAMILIES[name].save(folder)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_reference(name: str, saved: dict[str, tuple[Path, torch.nn.Module]]) -> None:
    family, (folder, model) = VISION_FAMILIES[name], saved[name]
    checkpoint = open_checkpoint(folder)
    program, vision = build_program(checkpoint), build_vision(checkpoint)
    assert vision is not None and vision.placeholder == PLACEHOLDER
    assert vision.tokens == family.tokens
    for ids, offsets in prompts(family):
        images = [family.image(seed) for seed in range(len(offsets))]
        given, reach = {}, [0] * len(ids)
        for image, offset in zip(images, offsets, strict=True):
            vision.check(image)
            for i, row in enumerate(reference_embeddings(vision, image)):
                given[offset + i] = row
                reach[offset + i] = family.tokens - 1 - i if vision.mutual else 0
        got = Reference(program).logits(ids, embeddings=given, reach=reach).numpy()
        expected = family.logits(model, ids, images)
        assert np.abs(expected).max() > 0.5
        assert np.abs(got - expected).max() < 2e-3
