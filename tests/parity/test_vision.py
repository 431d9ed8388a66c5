"""Models that take images, against transformers: the reference and the CPU backend."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.backends import get_backend
from octavo.backends.base import BLOCK, Executable, ProgramOptions, Span, StepInput, StepLimits
from octavo.backends.cpu import lower
from octavo.backends.torch.reference import Reference
from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.engine.encoder import CompiledEncoder, ImageEncoder, tower_step
from octavo.engine.images import PlacedImage
from octavo.engine.open import open_model
from octavo.errors import CheckpointError, Unsupported
from octavo.models import build_program, build_vision
from octavo.models.images import Layout, Vision
from octavo.program import Attention, Program
from octavo.vision.families import load_preprocessor
from octavo.vision.image import ImageInput
from tests.conftest import Runner
from tests.quantized_models import WRITERS, quantize_folder
from tests.vision_models import PLACEHOLDER, VISION_FAMILIES, VisionFamily

NAMES = sorted(VISION_FAMILIES)


def reference_embeddings(vision: Vision, image: ImageInput) -> torch.Tensor:
    def run(program: Program, rows: np.ndarray, **more: Any) -> list[np.ndarray]:
        """The output and the taps."""
        given = dict(enumerate(torch.from_numpy(np.ascontiguousarray(rows))))
        reference = Reference(program)
        found = reference.logits([0] * len(rows), embeddings=given, **more)
        return [found.numpy(), *(tap.numpy() for tap in reference.tapped)]

    layout, patches = vision.layout(image), vision.patches(image)
    states, first = [], 0
    for length in layout.spans:
        own = slice(first, first + length)
        more: dict[str, Any] = {}
        if layout.coordinates is not None:
            more["coordinates"] = layout.coordinates[:, own]
        if layout.segments is not None:
            more["segments"] = layout.segments[own]
        states.append(run(vision.tower.program, patches[own], **more))
        first += length
    projected = [
        run(projector, vision.merged(image, np.concatenate(rows)))[0]
        for projector, rows in zip(vision.projectors, zip(*states, strict=True), strict=True)
    ]
    return torch.from_numpy(vision.embeddings(image, np.concatenate(projected, axis=1)))


def prompts(family: VisionFamily) -> list[tuple[list[int], list[int], list[int]]]:
    """Token ids, which images are in them and where these begin: none, one, several beside each
    other, several apart of which one is at the end."""
    rng = np.random.default_rng(2)
    a, b, c = ([int(i) for i in rng.integers(3, 290, n)] for n in (5, 9, 3))
    apart = [298]  # between images, as every family's template has
    out = []
    for parts in ([a, b], [a, 0, b], [a, 1, apart, 2, b], [c, 3, a, 4, apart, 5], [6, a, 2]):
        ids, seeds, offsets = [], [], []
        for part in parts:
            if isinstance(part, int):
                seeds.append(part)
                offsets.append(len(ids))
                part = [PLACEHOLDER] * family.image(part).tokens
            ids += part
        out.append((ids, seeds, offsets))
    return out


def given_images(
    vision: Vision, ids: list[int], images: list[ImageInput], offsets: list[int]
) -> tuple[np.ndarray, np.ndarray | None]:
    """How far each token sees, and where each is along every axis, if there are several."""
    n, reach, shift = len(ids), np.zeros(len(ids), np.int32), 0
    places = np.tile(np.arange(n, dtype=np.int32), (3, 1))
    several = False
    for image, offset in zip(images, offsets, strict=True):
        end, layout = offset + image.tokens, vision.layout(image)
        if vision.mutual:
            reach[offset:end] = range(image.tokens - 1, -1, -1)
        placed = PlacedImage(image, offset, offset + shift, None, layout.advance, False)
        if layout.places is not None:
            several = True
            places[:, offset:end] = offset + shift + layout.places
        shift = placed.shift
        places[:, end:] = np.arange(end, n) + shift
    return reach, places if several else None


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
    for ids, seeds, offsets in prompts(family):
        images, given = [family.image(seed) for seed in seeds], {}
        for image, offset in zip(images, offsets, strict=True):
            vision.check(image)
            rows = reference_embeddings(vision, image)
            assert len(rows) == image.tokens
            given |= {offset + i: row for i, row in enumerate(rows)}
        reach, places = given_images(vision, ids, images, offsets)
        more = {} if places is None else {"coordinates": places}
        got = Reference(program).logits(ids, embeddings=given, reach=reach.tolist(), **more).numpy()
        expected = family.logits(model, ids, seeds)
        assert np.abs(expected).max() > 0.5
        assert np.abs(got - expected).max() < 2e-3


def encoded_logits(
    executable: Executable, encoder: ImageEncoder, ids: list[int], images: list[ImageInput],
    offsets: list[int],
) -> np.ndarray:  # fmt: skip
    """As an engine computes them: images in batches, then the prompt in one step."""
    n, embeddings, left = len(ids), [], list(images)
    rows = [o + i for o, image in zip(offsets, images, strict=True) for i in range(image.tokens)]
    reach, places = given_images(encoder.vision, ids, images, offsets)
    while left:
        count = max(k for k in range(1, len(left) + 1) if encoder.takes(left[:k]))
        encoder.begin(left[:count])
        embeddings += encoder.run(60.0) or []
        left = left[count:]
    step = StepInput(
        np.array(ids, np.int32), np.arange(n, dtype=np.int32), [Span(0, n, 0, 0)],
        np.arange((n + BLOCK - 1) // BLOCK, dtype=np.int32), np.arange(n, dtype=np.int32),
        embeddings=np.concatenate(embeddings), embedding_rows=np.array(rows, np.int32), reach=reach,
        coordinates=places,
    )  # fmt: skip
    executable.step(step)
    return executable.logits(n)


@pytest.mark.parametrize("name", NAMES)
def test_cpu(name: str, saved: dict[str, tuple[Path, torch.nn.Module]]) -> None:
    family, (folder, model) = VISION_FAMILIES[name], saved[name]
    checkpoint = open_checkpoint(folder)
    vision = build_vision(checkpoint)
    assert vision is not None
    encoder = CompiledEncoder.of(vision).load(checkpoint, 2, lambda _: None)
    runner = Runner(folder, 1024, kv_dtype="f32")
    divergence, same, total = 0.0, 0, 0
    for ids, seeds, offsets in prompts(family)[1:]:
        images = [family.image(seed) for seed in seeds]
        got = torch.from_numpy(encoded_logits(runner.executable, encoder, ids, images, offsets))
        expected = torch.from_numpy(family.logits(model, ids, seeds))
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
    ids, seeds, offsets = prompts(family)[1]
    images = [family.image(seed) for seed in seeds]
    got = encoded_logits(Runner(tmp_path).executable, encoder, ids, images, offsets)
    expected = family.logits(model, ids, seeds)
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
    assert [m.type.name for p in small.projectors for m in p.matrices] == ["F32"]
    assert small.footprint(2) < whole.footprint(2)
    exact = reference_embeddings(vision, family.image(8)).numpy()
    wide, rounded = (encoded(checkpoint, family.image(8), d) for d in ("auto", "int8"))
    error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert np.linalg.norm(wide - exact) / np.linalg.norm(exact) < NOISE / 100
    assert NOISE / 10 < error < NOISE * (2 * 4 * 3) ** 0.5


def test_a_tower_stored_in_bf16(
    tmp_path: Path, saved: dict[str, tuple[Path, torch.nn.Module]]
) -> None:
    """Its keys and values are bf16, and the error one of inputs rounded to bf16; images together
    are as each is alone. A tower of fp32 weights has a cache of fp32."""
    family = VISION_FAMILIES["llava"]
    family.save(tmp_path, "bfloat16")
    kinds = []
    for folder in (saved["llava"][0], tmp_path):
        vision = build_vision(open_checkpoint(folder))
        assert vision is not None
        kinds.append(CompiledEncoder.of(vision).kv_dtype)
    assert kinds == ["f32", "bf16"]
    encoder = CompiledEncoder.of(vision).load(open_checkpoint(tmp_path), 2, lambda _: None)
    images = [family.image(seed) for seed in range(3)]
    assert encoder.takes(images)
    encoder.begin(images)
    together = encoder.run(60.0) or []
    assert len(together) == 3
    for image, found in zip(images, together, strict=True):
        assert np.array_equal(encoded(open_checkpoint(tmp_path), image), found)
        exact = reference_embeddings(vision, image).numpy()
        assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < 2**-8


def test_a_tower_stored_in_int8(tmp_path: Path) -> None:
    """As compressed-tensors writes 8-bit layers: what its values give, and less in memory."""
    family = VISION_FAMILIES["llava"]
    family.save(tmp_path, "bfloat16")
    plain = open_checkpoint(tmp_path)
    vision = build_vision(plain)
    assert vision is not None
    options = ProgramOptions(StepLimits(32, 32, 4), 2, "f32")
    before = CompiledEncoder.of(vision).tower.footprint(options).weights
    values = quantize_folder(tmp_path, WRITERS["ct-int8"], lambda n: "encoder.layers" in n)
    assert len(values) == 18
    checkpoint = open_checkpoint(tmp_path)
    vision = build_vision(checkpoint)
    assert vision is not None
    assert CompiledEncoder.of(vision).tower.footprint(options).weights < before
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


def altered(source: Path, folder: Path, where: str, key: str, value: Any) -> Path:
    """A copy of a model's folder with another value in its config.json, or in a part of that."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (config[where] if where else config)[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "where, key, value, error",
    [
        ("", "vision_feature_layer", [-2, -3], Unsupported),
        ("", "vision_feature_layer", -9, Unsupported),
        ("", "vision_feature_select_strategy", "cls", Unsupported),
        ("", "projector_hidden_act", "mish", Unsupported),
        ("", "image_token_index", "x", CheckpointError),
        ("", "vision_config", None, CheckpointError),
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
    folder = altered(saved["llava"][0], tmp_path / "m", where, key, value)
    with pytest.raises(error):
        build_vision(open_checkpoint(folder))


def test_embeddings_of_another_width(
    tmp_path: Path, saved: dict[str, tuple[Path, torch.nn.Module]]
) -> None:
    shutil.copytree(saved["smolvlm"][0], tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    (name,) = (n for n in tensors if n.endswith("modality_projection.proj.weight"))
    save_file(tensors | {name: tensors[name][:32].clone()}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"make 32 features a token; .* takes 64"):
        open_model(tmp_path / "m")


def published(name: str, nested: Path, folder: Path) -> None:
    """The folder as Qwen publishes it: the language model's keys beside the others, and the names
    of earlier versions."""
    folder.mkdir()
    config = json.loads((nested / "config.json").read_text())
    text, own = config.pop("text_config"), config["vision_config"]
    parameters = text.pop("rope_parameters")
    text |= {
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": parameters["mrope_section"]},
    }
    own |= {"in_chans": 3, "spatial_patch_size": own["patch_size"]}
    own.pop("model_type")
    flat = text | config | {"vision_config": own, "vision_token_id": 304}
    (folder / "config.json").write_text(json.dumps(flat))
    shutil.copy(nested / "preprocessor_config.json", folder)
    tensors = {
        key.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value
        for key, value in load_file(nested / "model.safetensors").items()
    }
    assert {"visual.patch_embed.proj.weight", "model.embed_tokens.weight"} < set(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_published_qwen_folders(
    name: str, saved: dict[str, tuple[Path, torch.nn.Module]], tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    published(name, saved[name][0], folder)
    family = VISION_FAMILIES[name]
    found = []
    for path in (saved[name][0], folder):
        checkpoint = open_checkpoint(path)
        vision = build_vision(checkpoint)
        assert vision is not None
        rows = reference_embeddings(vision, family.image(0))
        program = build_program(checkpoint)
        found.append((rows, Reference(program).logits([5, 6, 7, 8]), vision.placeholder))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2] == PLACEHOLDER


# Keys of published folders that transformers' classes do not have.
PUBLISHED = {
    "llava": {"ignore_index": -100},
    "llava_next": {"ignore_index": -100, "use_image_newline_parameter": True},
    "smolvlm": {"vocab_size": 49280, "_flash_attn_2_enabled": True, "use_reentrant_checkpoints": False},
    "gemma3": {"boi_token_index": 298, "eoi_token_index": 299},
    "qwen2_vl": {"vision_token_id": 304},
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_outer_keys(
    name: str, saved: dict[str, tuple[Path, torch.nn.Module]], tmp_path: Path
) -> None:
    """Those that people publish are taken, unknown ones are refused by name."""
    folder = tmp_path / "m"
    shutil.copytree(saved[name][0], folder)
    config = json.loads((folder / "config.json").read_text())
    taken = PUBLISHED.get(name, {})
    (folder / "config.json").write_text(json.dumps(config | taken))
    assert build_vision(open_checkpoint(folder)) is not None
    (folder / "config.json").write_text(json.dumps(config | taken | {"something_new": 3}))
    with pytest.raises(Unsupported, match="something_new"):
        build_vision(open_checkpoint(folder))


class Names:
    """A tokenizer's names of tokens."""

    def name(self, token: int) -> str:
        return "<image>" if token == PLACEHOLDER else ""


@pytest.mark.parametrize("name", ["llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_preprocessors_from_folders(
    name: str, saved: dict[str, tuple[Path, torch.nn.Module]]
) -> None:
    checkpoint = open_checkpoint(saved[name][0])
    vision = build_vision(checkpoint)
    assert vision is not None
    found = load_preprocessor(
        checkpoint, Names(), family=vision.family, placeholder=vision.placeholder,  # type: ignore[arg-type]
        tokens=vision.tokens, size=vision.size,
    )  # fmt: skip
    assert found == VISION_FAMILIES[name].preprocessor


@pytest.mark.parametrize("lengths", [[16], [4, 300, 8], [3, 2, 1], [600]], ids=str)
def test_segments_and_coordinates(
    lengths: list[int], saved: dict[str, tuple[Path, torch.nn.Module]]
) -> None:
    """Any segments and coordinates, of spans of any length: as the reference, and each span as it
    is alone."""
    folder = saved["qwen2_5_vl"][0]
    vision = build_vision(open_checkpoint(folder))
    assert vision is not None
    program, rng = vision.tower.program, np.random.default_rng(sum(lengths))
    compiled = get_backend().compile(program)
    tower = compiled.load(
        open_checkpoint(folder), ProgramOptions(StepLimits(640, 640, 64), 2, "f32"), lambda _: None
    )
    parts = []
    for n in lengths:
        segments = np.sort(rng.integers(0, max(1, n // 7) + 1, n)).astype(np.int32)
        places = rng.integers(0, 50, (2, n)).astype(np.int32)
        features = rng.normal(size=(n, program.ops[0].out.width)).astype(np.float32)
        parts.append((Layout((n,), 0, places, segments), features))

    def run(own: list[tuple[Layout, np.ndarray]]) -> np.ndarray:
        step = tower_step([layout for layout, _ in own], np.concatenate([f for _, f in own]))
        tower.run(step, 0, tower.pauses[-1])
        return tower.logits(sum(layout.rows for layout, _ in own))

    together = np.split(run(parts), np.cumsum(lengths)[:-1])
    for (layout, features), got in zip(parts, together, strict=True):
        assert np.array_equal(run([(layout, features)]), got)
        want = Reference(program).logits(
            [0] * layout.rows, embeddings=dict(enumerate(torch.from_numpy(features))),
            coordinates=layout.coordinates, segments=layout.segments,
        )  # fmt: skip
        assert np.abs(got - want.numpy()).max() < 2e-3


def test_steps_without_sound_segments_are_refused(
    saved: dict[str, tuple[Path, torch.nn.Module]],
) -> None:
    folder = saved["qwen2_5_vl"][0]
    vision = build_vision(open_checkpoint(folder))
    assert vision is not None
    tower = (
        get_backend()
        .compile(vision.tower.program)
        .load(
            open_checkpoint(folder), ProgramOptions(StepLimits(64, 64, 8), 1, "f32"), lambda _: None
        )
    )
    image = VISION_FAMILIES["qwen2_5_vl"].image(0)
    step = tower_step([vision.layout(image)], vision.patches(image))
    assert step.segments is not None and step.coordinates is not None
    for wrong, said in (
        ({"segments": None}, "the segment of every row"),
        ({"segments": step.segments[::-1].copy()}, "ascend"),
        ({"segments": step.segments[1:]}, "disagree"),
        ({"coordinates": step.coordinates[:1]}, "missing an axis"),
        ({"coordinates": step.coordinates[:, 1:].copy()}, "disagree"),
    ):
        with pytest.raises(ValueError, match=said):
            tower.run(replace(step, **wrong), 0, tower.pauses[-1])  # type: ignore[arg-type]
    tower.run(step, 0, tower.pauses[-1])


@pytest.mark.parametrize(
    "where, key, value, error",
    [
        ("vision_config", "something_new", 3, Unsupported),
        ("vision_config", "in_channels", 4, Unsupported),
        ("vision_config", "num_heads", 5, CheckpointError),
        ("vision_config", "window_size", 4, CheckpointError),
        ("vision_config", "fullatt_block_indexes", 3, CheckpointError),
        ("vision_config", "rope_parameters", {"rope_type": "linear", "factor": 2.0}, Unsupported),
        ("vision_config", "depth", 10**6, CheckpointError),
        ("", "image_token_id", "x", CheckpointError),
        ("text_config", "rope_parameters", {"mrope_section": [2, 2, 2]}, CheckpointError),
        ("text_config", "rope_parameters", [1], CheckpointError),
    ],
)
def test_qwen_settings_that_are_not_known(
    where: str, key: str, value: Any, error: type[Exception], tmp_path: Path,
    saved: dict[str, tuple[Path, torch.nn.Module]],
) -> None:  # fmt: skip
    folder = altered(saved["qwen2_5_vl"][0], tmp_path / "m", where, key, value)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(error):
        build_program(checkpoint)
        build_vision(checkpoint)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen2_5_vl"])
def test_buffers_of_a_tower_do_not_grow_with_its_layers(
    name: str, saved: dict[str, tuple[Path, torch.nn.Module]]
) -> None:
    vision = build_vision(open_checkpoint(saved[name][0]))
    assert vision is not None
    program = vision.tower.program
    attentions = [i for i, op in enumerate(program.ops) if isinstance(op, Attention)]
    layer = program.ops[attentions[0] + 1 : attentions[1] + 1]
    assert len(attentions) > 1 and len(lower(program).buffers) <= 7 < len(layer)
