"""Recipes for what encodes images and for keys and values: what is rounded, and what is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from compressed_tensors.quantization import QuantizationConfig
from gguf import GGMLQuantizationType as Q

import octavo
from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.base import TensorType
from octavo.checkpoint.dequantize import dequantize
from octavo.compress import calibrated
from octavo.compress.beside import beside
from octavo.compress.folder_view import as_folder
from octavo.compress.recipe_file import read_recipe
from octavo.engine.encoder import CompiledEncoder
from octavo.engine.open import open_model
from octavo.engine.plan import make_plan
from octavo.errors import UsageError
from octavo.models import build_vision
from octavo.vision.image import ImageInput
from tests.conftest import Runner
from tests.small_models import Small
from tests.vision_models import VISION_FAMILIES, VisionFamily

TOWER = {"hidden_size": 64, "num_attention_heads": 4}
LAYERS = [f"self_attn.{p}_proj" for p in ("q", "k", "v", "out")] + ["mlp.fc1", "mlp.fc2"]


def family() -> VisionFamily:
    """LLaVA with a tower whose rows are whole groups."""
    llava = VISION_FAMILIES["llava"]
    tower = llava.settings["vision_config"] | TOWER
    return replace(llava, settings=llava.settings | {"vision_config": tower})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small_gguf: Callable[..., Path]) -> Path:
    out = tmp_path_factory.mktemp("llava")
    family().save(out)
    for name, file in beside(as_folder(open_checkpoint(small_gguf(Small(), Q.F32)))).items():
        if "tokenizer" in name:
            (out / name).write_bytes(file.make())  # type: ignore[union-attr]
    return out


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(calibrated, "SEQUENCES", 2)
    monkeypatch.setattr(calibrated, "LENGTH", 64)
    words = np.random.default_rng(3).choice(list("abcdeth "), 4000)
    (tmp_path / "text.txt").write_text("".join(words))
    return tmp_path / "text.txt"


def embeddings(folder: Path, image: ImageInput) -> np.ndarray:
    checkpoint = open_checkpoint(folder)
    vision = build_vision(checkpoint)
    assert vision is not None
    encoder = CompiledEncoder.of(vision).load(checkpoint, 1, lambda _: None)
    encoder.begin([image])
    found = encoder.run(60.0)
    assert found is not None
    return found[0]


def test_what_encodes_images_becomes_int8(folder: Path, text: Path, tmp_path: Path) -> None:
    """Layers of the tower that are used in 8 bits with int8 inputs, those of the language model by
    GPTQ in 4; the projector, embeddings and the head keep every value."""
    done = octavo.quantize(folder, recipe="vlm-default", output=tmp_path / "out", data=text)
    before, after = open_checkpoint(folder), open_checkpoint(done.output)
    assert before.tensors.keys() == after.tensors.keys()
    ends = tuple(f"encoder.layers.{i}.{name}.weight" for i in range(2) for name in LAYERS)
    tower = {n for n in before.tensors if n.endswith(ends)}
    assert len(tower) == len(ends)
    language = {loss.name for loss in done.losses}
    assert len(language) == 7 * 3 and not language & tower
    assert all(loss.error <= loss.plain for loss in done.losses)
    assert {after.tensors[n].type for n in tower} == {TensorType.INT8}
    assert {after.tensors[n].type for n in language} == {TensorType.INT4_MIN}
    for name in before.tensors.keys() - tower - language:
        assert (before.tensors[name].vector() == after.tensors[name].vector()).all()
    assert after.nbytes == done.bytes_after
    config = QuantizationConfig.model_validate(after.metadata["quantization_config"])
    many, few = (config.config_groups[f"group_{i}"] for i in range(2))
    assert (many.weights.num_bits, many.input_activations) == (4, None)
    assert (few.weights.num_bits, few.input_activations.dynamic) == (8, True)
    assert {f"{n}.weight" for n in few.targets} == tower
    image = family().image(1)
    a, b = embeddings(folder, image), embeddings(done.output, image)
    # A row of 64 numbers of one normal distribution spans 2.4 of its deviations: steps of
    # 2.4 / 127 lose 0.0055 of it. Errors of twelve layers add up as squares, to 0.02 at most.
    assert 0 < np.linalg.norm(a - b) < 0.02 * np.linalg.norm(a)


def test_models_of_text_are_refused(small_gguf: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="takes no images, which vlm-default is for"):
        octavo.quantize(small_gguf(Small(), Q.F32), recipe="vlm-default", output=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_model_says_how_keys_and_values_are_cached(
    small_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    """Weights stay; what is asked for goes before what the folder says."""
    source = small_gguf(Small(), Q.F32)
    done = octavo.quantize(source, recipe="kv-int8", output=tmp_path / "out")
    before, made = as_folder(open_checkpoint(source)), open_model(done.output)
    for name, tensor in before.tensors.items():
        assert (dequantize(tensor) == dequantize(made.checkpoint.tensors[name])).all()
    QuantizationConfig.model_validate(made.checkpoint.metadata["quantization_config"])
    asked = ("auto", "bf16", "f32", "int8")
    plans = [make_plan(made.compiled, name="", threads=1, kv_dtype=k).kv_dtype for k in asked]
    assert plans == ["int8", "bf16", "f32", "int8"]
    ids = list(range(97, 120))
    own, int8, wide = (
        Runner(done.output, kv_dtype=k).logits(ids).copy() for k in ("auto", "int8", "f32")
    )
    assert (own == int8).all() and (own != wide).any()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("formats: [mlx]\nweights: {bits: 4}\nvision: int8-dynamic", "line 3: vision is stored as"),
        ("formats: [gptq]\nweights: {bits: 4}\nkv: int8", "line 3: kv is stored as compressed-tensors"),
        ("formats: [gguf]\nfile_type: 1\nweights: F16\nkv: int8", "line 4: kv is of folders"),
        ("formats: [compressed-tensors]\nweights: keep\nkv: int3", "line 3: 'int3' is none of int8"),
        ("formats: [compressed-tensors]\nweights: keep\nmethod: gptq", "line 2: gptq needs a scheme"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together(wrong: str, says: str) -> None:
    with pytest.raises(UsageError) as e:
        read_recipe(wrong, "own.yaml")
    assert str(e.value).startswith(f"own.yaml, {says}")
