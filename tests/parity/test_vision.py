"""Models that take images, against transformers: the reference and the CPU backend."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.backends.base import BLOCK, Span, StepInput
from octavo.backends.torch.reference import Reference
from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.engine.encoder import CompiledEncoder, ImageEncoder
from octavo.errors import CheckpointError, Unsupported
from octavo.models import build_program, build_vision
from octavo.models.vision import VisionModel
from octavo.vision.image import ImageInput
from tests.conftest import Runner
from tests.quantized_models import WRITERS, quantize_folder
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


def cpu_logits(
    runner: Runner, encoder: ImageEncoder, ids: list[int], images: list[ImageInput],
    offsets: list[int],
) -> np.ndarray:  # fmt: skip
    """As an engine computes them: images in batches, then the prompt in one step."""
    n, vision = len(ids), encoder.vision
    rows = [o + i for o in offsets for i in range(vision.tokens)]
    reach = np.zeros(n, np.int32)
    for offset in offsets if vision.mutual else ():
        reach[offset : offset + vision.tokens] = range(vision.tokens - 1, -1, -1)
    embeddings: list[Any] = []
    for first in range(0, len(images), encoder.batch):
        encoder.begin(images[first : first + encoder.batch])
        embeddings += encoder.run(60.0) or []
    step = StepInput(
        np.array(ids, np.int32), np.arange(n, dtype=np.int32), [Span(0, n, 0, 0)],
        np.arange((n + BLOCK - 1) // BLOCK, dtype=np.int32), np.arange(n, dtype=np.int32),
        embeddings=np.concatenate(embeddings), embedding_rows=np.array(rows, np.int32), reach=reach,
    )  # fmt: skip
    runner.executable.step(step)
    return runner.executable.logits(n)


@pytest.mark.parametrize("name", NAMES)
def test_cpu(name: str, saved: dict[str, tuple[Path, torch.nn.Module]]) -> None:
    family, (folder, model) = VISION_FAMILIES[name], saved[name]
    checkpoint = open_checkpoint(folder)
    vision = build_vision(checkpoint)
    assert vision is not None
    encoder = CompiledEncoder.of(vision).load(checkpoint, 2, lambda _: None)
    runner = Runner(folder, kv_dtype="f32")
    divergence, same, total = 0.0, 0, 0
    for ids, offsets in prompts(family)[1:]:
        images = [family.image(seed) for seed in range(len(offsets))]
        got = torch.from_numpy(cpu_logits(runner, encoder, ids, images, offsets))
        expected = torch.from_numpy(family.logits(model, ids, images))
        p, q = got.log_softmax(-1), expected.log_softmax(-1)
        divergence += float((q.exp() * (q - p)).sum())
        same += int((got.argmax(-1) == expected.argmax(-1)).sum())
        total += len(ids)
    assert divergence / total <= 2e-3
    assert same / total >= 0.99


def test_half_precision(tmp_path: Path) -> None:
    """Weights in bf16, as models are published."""
    family = VISION_FAMILIES["llava"]
    model = family.save(tmp_path, "bfloat16")
    checkpoint = open_checkpoint(tmp_path)
    vision = build_vision(checkpoint)
    assert vision is not None
    encoder = CompiledEncoder.of(vision).load(checkpoint, 2, lambda _: None)
    ids, offsets = prompts(family)[1]
    image = family.image(3)
    got = cpu_logits(Runner(tmp_path), encoder, ids, [image], offsets)
    expected = family.logits(model, ids, [image])
    assert (got.argmax(-1) == expected.argmax(-1)).mean() >= 0.97
    assert np.abs(got - expected).max() < 0.1


def encoded(checkpoint: Checkpoint, image: ImageInput, dtype: str = "auto") -> np.ndarray:
    vision = build_vision(checkpoint)
    assert vision is not None
    encoder = CompiledEncoder.of(vision, dtype).load(checkpoint, 2, lambda _: None)
    encoder.begin([image])
    (found,) = encoder.run(60.0) or []
    return found


# Rounding to steps of 1/127 of the largest of a few dozen normal numbers (3 rms) is noise of
# 3 / 127 / sqrt(12) of their rms: of weights and of inputs, in each of the layers one comes after.
NOISE = 3 / 127 / 12**0.5


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_int8(name: str, saved: dict[str, tuple[Path, torch.nn.Module]]) -> None:
    """Layers of the tower and their inputs in 8 bits; the projector and what reads pixels are not."""
    checkpoint, family = open_checkpoint(saved[name][0]), VISION_FAMILIES[name]
    vision = build_vision(checkpoint)
    assert vision is not None
    whole, small = CompiledEncoder.of(vision), CompiledEncoder.of(vision, "int8")
    layers = 6 * (2 if name == "llava" else 3)  # llava takes the last but one
    assert {m.type.name: m.count for m in small.tower.matrices} == {"INT8": layers, "F32": 2}
    assert [m.type.name for m in small.projector.matrices] == ["F32"]
    assert small.footprint(2) < whole.footprint(2)
    exact = reference_embeddings(vision, family.image(8)).numpy()
    wide, rounded = (encoded(checkpoint, family.image(8), d) for d in ("auto", "int8"))
    error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert np.linalg.norm(wide - exact) / np.linalg.norm(exact) < NOISE / 100
    assert NOISE / 10 < error < NOISE * (2 * 4 * 3) ** 0.5


def test_a_tower_stored_in_int8(tmp_path: Path) -> None:
    """As compressed-tensors writes 8-bit layers: what its values give, and less in memory."""
    family = VISION_FAMILIES["llava"]
    family.save(tmp_path, "bfloat16")
    plain = open_checkpoint(tmp_path)
    vision = build_vision(plain)
    assert vision is not None
    before = CompiledEncoder.of(vision).footprint(2)
    values = quantize_folder(tmp_path, WRITERS["ct-int8"], lambda n: "encoder.layers" in n)
    assert len(values) == 18
    checkpoint = open_checkpoint(tmp_path)
    vision = build_vision(checkpoint)
    assert vision is not None
    assert CompiledEncoder.of(vision).footprint(2) < before
    exact = reference_embeddings(vision, family.image(8)).numpy()
    for dtype, most in (("auto", NOISE), ("int8", NOISE * 12**0.5)):
        error = np.linalg.norm(encoded(checkpoint, family.image(8), dtype) - exact)
        assert error / np.linalg.norm(exact) < most


def test_a_folder_that_does_not_say_how_images_are_prepared(tmp_path: Path) -> None:
    VISION_FAMILIES["llava"].save(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    checkpoint = open_checkpoint(tmp_path)
    assert build_vision(checkpoint) is None
    assert build_program(checkpoint).vocabulary == 320


@pytest.mark.parametrize(
    "where, key, value, error",
    [
        ("", "vision_feature_layer", [-2, -3], Unsupported),
        ("", "vision_feature_layer", -9, Unsupported),
        ("", "vision_feature_select_strategy", "cls", Unsupported),
        ("", "projector_hidden_act", "mish", Unsupported),
        ("", "image_token_index", "x", CheckpointError),
        ("", "something_new", 3, Unsupported),
        ("vision_config", "something_new", 3, Unsupported),
        ("vision_config", "num_channels", 4, Unsupported),
        ("vision_config", "num_attention_heads", 5, CheckpointError),
        ("vision_config", "patch_size", 7, CheckpointError),
        ("vision_config", "model_type", "dinov2", Unsupported),
    ],
)
def test_settings_that_are_not_known(
    where: str, key: str, value: Any, error: type[Exception], tmp_path: Path,
    saved: dict[str, tuple[Path, torch.nn.Module]],
) -> None:  # fmt: skip
    folder = tmp_path / "m"
    shutil.copytree(saved["llava"][0], folder)
    config = json.loads((folder / "config.json").read_text())
    (config[where] if where else config)[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(error):
        build_vision(open_checkpoint(folder))
