"""Layers lose no more than by rounding to the nearest, in every layout and of every source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import octavo
from octavo.backends.torch.spans import Spans
from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.base import TensorType
from octavo.checkpoint.dequantize import dequantize
from octavo.compress import calibrated
from octavo.compress.beside import beside
from octavo.compress.blocks import encode
from octavo.compress.data import split, token_blocks
from octavo.compress.folder_view import as_folder
from octavo.compress.quantize import job_of
from octavo.compress.recipe_file import builtin, find_recipe
from octavo.compress.recipes import FolderRecipe, Recipe
from octavo.compress.statistics import InputStatistics
from octavo.errors import UsageError, WriteError
from octavo.models import build_program
from octavo.program import Linear
from octavo.text.tokenizer import load_tokenizer
from tests.calibration.small import SMALL, quantized, save_changed
from tests.conftest import Runner
from tests.families import FAMILIES, save_family

CALIBRATED = [
    r for r in builtin().values() if isinstance(r, FolderRecipe) and r.calibrated and not r.vision
]


@pytest.mark.parametrize("recipe", CALIBRATED, ids=lambda r: r.name)
def test_no_layer_loses_more(recipe: Recipe, folder: Path, text: Path, tmp_path: Path) -> None:
    forecast = job_of(open_checkpoint(folder), recipe, tmp_path / "out").forecast()
    done = quantized(folder, recipe.name, tmp_path / "out", text)
    assert len(done.losses) == 7 * SMALL.layers
    assert not done.kept and done.resumed == 0
    if recipe.name.startswith("distilled"):
        assert done.learned is not None and done.learned[0] >= done.learned[1] > 0
    else:
        assert done.learned is None
    assert all(0 <= loss.error <= loss.plain for loss in done.losses)
    assert all(
        loss.method in (recipe.name.split("-")[0], recipe.method, "rtn") for loss in done.losses
    )
    assert open_checkpoint(done.output).nbytes == done.bytes_after
    assert bool(done.dynamic) <= (recipe.name == "w8a8")
    size = forecast.bytes_after - 2 * len(done.dynamic)  # each step is one number of fp16
    reads = forecast.reads[0], forecast.reads[1] - 2 * len(done.dynamic)
    assert done == replace(
        forecast, losses=done.losses, learned=done.learned, dynamic=done.dynamic, bytes_after=size,
        reads=reads,
    )  # fmt: skip
    ids = np.random.default_rng(0).integers(97, 104, 64).tolist()
    a, b = (Runner(p, kv_dtype="f32").logits(ids) for p in (folder, done.output))
    assert 0 < ((a - b) ** 2).mean() < (a**2).mean()  # nearer than zeros; others' are twice as far
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.fixture(scope="module")
def by_gptq(folder: Path, text: Path) -> Path:
    out = folder.with_name("by-gptq")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrated, "SEQUENCES", 4)
        patch.setattr(calibrated, "LENGTH", 96)
        quantized(folder, "gptq-4", out, text, "gptq")
    return out


@pytest.mark.parametrize("layout", ["awq", "compressed-tensors", "mlx", "safetensors"])
def test_layouts_hold_the_same(
    layout: str, folder: Path, text: Path, by_gptq: Path, tmp_path: Path
) -> None:
    """The values that later layers were rounded with, whatever the file: MLX rounds biases, floats
    are rounded to what they were stored as."""
    done = quantized(folder, "gptq-4", tmp_path / "b", text, layout)
    one, other = open_checkpoint(by_gptq).tensors, open_checkpoint(tmp_path / "b").tensors
    for loss in done.losses:
        x, y = dequantize(one[loss.name]), dequantize(other[loss.name])
        assert np.abs(x - y).max() <= (2.0**-11 * np.abs(x).max() if layout == "mlx" else 0)
    assert sum(x.error for x in done.losses) < 0.7 * sum(x.plain for x in done.losses)


def test_a_gguf_file_is_dequantised_first(gguf: Path, text: Path, tmp_path: Path) -> None:
    done = quantized(gguf, "gptq-4", tmp_path / "out", text)
    ids = list(range(97, 120))
    a, b = (Runner(p, kv_dtype="f32").logits(ids) for p in (gguf, done.output))
    assert 0 < ((a - b) ** 2).mean() < 0.2 * (a**2).mean()
    assert (done.output / "tokenizer.json").exists()


@pytest.mark.parametrize("recipe", ["gptq-4", "rtn-8"])
def test_blocks_of_a_gguf_file(recipe: str, gguf: Path, text: Path, tmp_path: Path) -> None:
    """Layers hold what a folder holds that has the same groups; an earlier attempt is gone."""
    (tmp_path / ".x.gguf.octavo-folder").mkdir()
    (tmp_path / ".x.gguf.octavo-folder" / "left").touch()
    data = text if recipe == "gptq-4" else None
    source, bits = open_checkpoint(gguf), int(recipe[-1])
    own = tmp_path / "own.yaml"
    own.write_text(
        f"method: {recipe[:-2]}\nformats: [compressed-tensors]\n"
        f"weights: {{bits: {bits}, group: 32, symmetric: true}}\n"
    )
    job = job_of(source, find_recipe(recipe), tmp_path / "x.gguf", "gguf", data)
    done = job.run()
    like = job_of(source, find_recipe(str(own)), tmp_path / "like", None, data).run()
    made = open_checkpoint(tmp_path / "x.gguf")
    layers = [n for n in made.tensors if ".attn_" in n or ".ffn_" in n]
    layers = [n for n in layers if "norm" not in n]
    kind = "Q4_0" if bits == 4 else "Q8_0"
    assert {made.tensors[n].type.name for n in layers} == {kind}
    assert done.kinds[kind] == len(layers) == 7 * SMALL.layers
    assert done.kinds == job.forecast().kinds and done.losses == like.losses
    assert made.nbytes == done.bytes_after
    seen = as_folder(made).tensors
    for name, tensor in open_checkpoint(like.output).tensors.items():
        assert (dequantize(seen[name]) == dequantize(tensor)).all()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["like", "own.yaml", "x.gguf"]


def test_experts(text: Path, gguf: Path, tmp_path: Path) -> None:
    """Every expert is rounded with the tokens that are routed to it, or to the nearest without."""
    save_family(FAMILIES["mixtral"], tmp_path / "moe")
    for name, file in beside(as_folder(open_checkpoint(gguf))).items():
        if "tokenizer" in name:
            (tmp_path / "moe" / name).write_bytes(file.make())  # type: ignore[union-attr]
    source = open_checkpoint(tmp_path / "moe")
    job = job_of(source, find_recipe("gptq-4"), tmp_path / "out", "gptq", text)
    done = job.run()
    experts = [x for x in done.losses if ".experts." in x.name]
    assert len(experts) + len(done.kept) >= 3 * 2 and experts
    assert all(x.error <= x.plain for x in done.losses)


def test_importance(gguf: Path, text: Path, tmp_path: Path) -> None:
    """Columns count as the mean squares of what comes in: less of it is lost than without."""
    source = open_checkpoint(gguf)
    job = job_of(source, find_recipe("q4_0"), tmp_path / "with.gguf", None, text)
    with_it = job.run()
    job_of(source, find_recipe("q4_0"), tmp_path / "without.gguf").run()
    made, without = (open_checkpoint(tmp_path / f"{n}.gguf").tensors for n in ("with", "without"))
    assert with_it.bytes_after == sum(t.nbytes for t in made.values())
    program, tokenizer = build_program(source), load_tokenizer(source)
    tokens = token_blocks(split("calibration", text), tokenizer, 96, 4)
    for name in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight"):
        i = next(
            i
            for i, o in enumerate(program.ops)
            if isinstance(o, Linear) and o.weight.tensor.name == name
        )
        spans, inputs = Spans(program, tokens, tmp_path), InputStatistics(made[name].shape[1])
        spans.run(0, i)
        for x in spans.inputs(program.ops[i].inputs[0]):
            inputs.update(x)
        spans.close()
        w, squares = dequantize(source.tensors[name]), inputs.mean_square
        assert (made[name].raw() == encode(w, TensorType.Q4_0, squares).reshape(-1)).all()
        lost = [(squares * (w - dequantize(m[name])) ** 2).sum() for m in (made, without)]
        assert lost[0] < lost[1]


def test_layers_that_int8_inputs_spoil_stay(gguf: Path, text: Path, tmp_path: Path) -> None:
    """One feature takes all of int8's steps and counts for nothing; what makes it is kept, so that
    no scale can be folded in."""
    stays = "model.layers.0.mlp.down_proj"

    def spoilt(name: str, x: np.ndarray) -> np.ndarray:
        if name == "model.layers.0.mlp.up_proj.weight":
            x[0] *= 3000
        if name == f"{stays}.weight":
            x[:, 0] = 0
        return x

    source = save_changed(gguf, tmp_path / "spoilt", spoilt)
    own = tmp_path / "own.yaml"
    own.write_text(
        "method: smoothquant\nactivations: dynamic\nformats: [compressed-tensors]\n"
        "weights: {bits: 8, group: 0, symmetric: true}\n"
        "layers: [{match: '*.up_proj.weight', weights: keep}]\n"
    )
    done = quantized(source, str(own), tmp_path / "out", text)
    ups = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(2)]
    assert done.kept == (f"{stays}.weight", *ups)
    a, b = (open_checkpoint(p) for p in (source, done.output))
    assert (
        dequantize(a.tensors[f"{stays}.weight"]) == dequantize(b.tensors[f"{stays}.weight"])
    ).all()
    assert stays in b.metadata["quantization_config"]["ignore"]
    assert b.nbytes == done.bytes_after


def test_one_step_where_it_loses_no_more(gguf: Path, text: Path, tmp_path: Path) -> None:
    """Layers whose tokens differ much in size have a step for each; config.json says which, and
    layers that share an input are alike."""
    norm = "model.layers.1.post_attention_layernorm.weight"
    source = save_changed(gguf, tmp_path / "one", lambda n, x: x * (0 if n == norm else 1))
    done = quantized(source, "w8a8", tmp_path / "out", text)
    made = open_checkpoint(done.output)
    config = made.metadata["quantization_config"]["config_groups"].values()
    steps = {g["input_activations"]["dynamic"]: g["targets"] for g in config}
    with safe_open(next(iter(made.sources)), "np") as stored:
        fixed = {n.removesuffix(".input_scale") for n in stored.keys() if "input_scale" in n}
    dynamic = {n.removesuffix(".weight") for n in done.dynamic}
    layers = {n.removesuffix(".weight") for n in (loss.name for loss in done.losses)}
    assert dynamic and fixed and fixed == layers - dynamic
    named = {is_dynamic: set(t) for is_dynamic, t in steps.items() if t != ["Linear"]}
    assert named in ({True: dynamic}, {False: fixed})
    for i in range(SMALL.layers):
        alike = {f"model.layers.{i}.self_attn.{x}_proj" for x in "qkv"}
        assert alike <= dynamic or alike <= fixed


def test_python_api(folder: Path, text: Path, tmp_path: Path) -> None:
    done = octavo.quantize(str(folder), recipe="rtn-4", output=str(tmp_path / "out"), format="mlx")
    assert done.output == tmp_path / "out" and done.bits < 12
    with pytest.raises(AttributeError):
        done.bits = 4  # type: ignore[misc]
    with pytest.raises(WriteError, match="is not empty"):
        octavo.quantize(folder, recipe="rtn-4", output=tmp_path / "out")
    with pytest.raises(UsageError, match="no file or folder"):
        octavo.quantize(folder, recipe="gptq-4", output=tmp_path / "x", data=tmp_path / "none.txt")
