"""Models rounded with data: inputs as the model computes them, layers that lose no more than by
rounding to the nearest, and runs that go on where they were cut off with the same bytes."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from safetensors import safe_open

import octavo
from octavo.backends.torch.reference import Reference
from octavo.backends.torch.spans import Spans
from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.base import TensorType
from octavo.checkpoint.dequantize import dequantize
from octavo.checkpoint.writer import NewTensor, write_folder
from octavo.compress import calibrated, scaled, written
from octavo.compress.beside import beside
from octavo.compress.blocks import encode
from octavo.compress.calibration import Calibration
from octavo.compress.data import split, token_blocks
from octavo.compress.folder_view import as_folder
from octavo.compress.groups import blocks, whole
from octavo.compress.jobs import Rounded
from octavo.compress.journal import Journal
from octavo.compress.quantize import job_of
from octavo.compress.recipe_file import builtin, find_recipe, read_recipe
from octavo.compress.recipes import FolderRecipe, Recipe
from octavo.compress.statistics import InputStatistics
from octavo.errors import UsageError, WriteError
from octavo.models import build_program
from octavo.program import Experts, Linear, Program
from octavo.text.tokenizer import load_tokenizer
from tests.conftest import Runner
from tests.families import FAMILIES, save_family
from tests.small_models import Small, save_gguf

SMALL = Small(heads=4, kv_heads=2, head_dim=32, hidden=128, ffn=256, layers=2, tied=False)
CALIBRATED = [
    r for r in builtin().values() if isinstance(r, FolderRecipe) and r.calibrated and not r.vision
]
COMMAND = [sys.executable, "-m", "octavo.cli.main", "quantize"]


@pytest.fixture(scope="module")
def gguf(small_gguf: Callable[..., Path]) -> Path:
    return small_gguf(SMALL, Q.F32)


@pytest.fixture(scope="module")
def folder(gguf: Path) -> Path:
    """The same model as a folder, with a tokenizer."""
    out = gguf.with_name("small")
    return save_changed(gguf, out, lambda name, x: x)


@pytest.fixture(scope="module")
def text(gguf: Path) -> Path:
    """Words of a small vocabulary: inputs are far from independent."""
    rng, path = np.random.default_rng(3), gguf.with_name("text.jsonl")
    words = ["".join(rng.choice(list("abcdeth "), 9)) for _ in range(40)]
    lines = [json.dumps({"text": " ".join(rng.choice(words, 400))}) for _ in range(16)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrated, "SEQUENCES", 4)
    monkeypatch.setattr(calibrated, "LENGTH", 96)


def save_changed(source: Path, out: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> Path:
    """A folder of a model with other weights."""
    c = as_folder(open_checkpoint(source))
    tensors = {
        n: NewTensor.of(np.ascontiguousarray(change(n, np.array(dequantize(t)))), TensorType.F32)
        for n, t in c.tensors.items()
    }
    write_folder(out, c.metadata, tensors, beside(c))
    return out


def of_runs(told: list[str]) -> Callable[[str], None]:
    """Takes down what is said of earlier runs."""
    return lambda text: None if text.startswith("layers see") else told.append(text)


def quantized(
    source: Path, recipe: str, out: Path, text: Path, format: str | None = None
) -> Rounded:
    return octavo.quantize(source, recipe=recipe, output=out, data=text, format=format)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


# -- what layers see ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3", "olmoe", "gpt2"])
@pytest.mark.parametrize("memory", [1 << 30, 0])
def test_spans(family: str, memory: int, tmp_path: Path) -> None:
    """Cut anywhere, in memory or in a file: the inputs of every layer are the reference's."""
    save_family(FAMILIES[family], tmp_path / "model")
    program = build_program(open_checkpoint(tmp_path / "model"))
    tokens = np.random.default_rng(0).integers(5, program.vocabulary, (3, 17), dtype=np.int32)
    spans = Spans(program, tokens, tmp_path, memory=memory)
    at, seen = 0, 0
    for i, op in enumerate(program.ops):
        if not isinstance(op, Linear | Experts) or op.out.selected:
            continue
        spans.run(at, i)
        at = i
        if seen % 5 == 0:
            until = Reference(replace(program, ops=program.ops[:i], output=op.x))
            for ids, x in zip(tokens.tolist(), spans.inputs(op.x), strict=True):
                assert (until.logits(ids).numpy() == x).all()
        seen += 1
    assert seen > 4
    spans.close()


def test_expert_inputs(tmp_path: Path) -> None:
    """Each expert sees the tokens that are routed to it, and its second matrix what the first gave."""
    save_family(FAMILIES["mixtral"], tmp_path / "model")
    program = build_program(open_checkpoint(tmp_path / "model"))
    tokens = np.random.default_rng(0).integers(5, program.vocabulary, (2, 40), dtype=np.int32)
    i, op = next((i, op) for i, op in enumerate(program.ops) if isinstance(op, Experts))
    spans = Spans(program, tokens, tmp_path)
    spans.run(0, i)
    reference, counted = Reference(program), 0
    out = [torch.zeros(40, op.out.width) for _ in tokens]
    xs, routes = list(spans.inputs(op.x)), list(spans.inputs(op.routes))
    for e in range(len(op.gate)):
        outer = list(spans.expert_inputs(op, e, inner=False))
        inner = list(spans.expert_inputs(op, e, inner=True))
        for s in range(2):
            rows = routes[s][:, e].nonzero()[0]
            counted += len(rows)
            assert (outer[s] == xs[s][rows]).all()
            y = torch.from_numpy(inner[s]) @ reference.weight(op.down[e]).T
            out[s][rows] += torch.from_numpy(routes[s][rows, e, None]) * y
    assert counted == 2 * 40 * int((routes[0][0] > 0).sum())
    spans.run(i, i + 1)
    for found, x in zip(out, spans.inputs(op.out), strict=True):
        assert np.allclose(found.numpy(), x, rtol=1e-4, atol=1e-5)
    spans.close()


def test_groups(folder: Path, tmp_path: Path) -> None:
    """Layers in the order in which their inputs are known; a block reads one value of the others."""
    program = build_program(open_checkpoint(folder))
    wanted = {whole(op.weight.tensor)[0] for op in program.ops if isinstance(op, Linear)}
    found = [
        [tuple(n.split(".")[-2] for n in g.layers) for g in b.groups]
        for b in blocks(program, wanted)
    ]
    attention = [("q_proj", "k_proj", "v_proj"), ("o_proj",)]
    mlp = [("gate_proj", "up_proj"), ("down_proj",)]
    assert found == [attention, mlp, attention, mlp, [("lm_head",)]]
    save_family(FAMILIES["phi3"], tmp_path / "fused")
    program = build_program(open_checkpoint(tmp_path / "fused"))
    wanted = {whole(op.weight.tensor)[0] for op in program.ops if isinstance(op, Linear)}
    first = blocks(program, wanted)[0].groups[0].layers
    assert [n.split(".")[-2] for n in first] == ["qkv_proj"]


# -- methods ------------------------------------------------------------------------------------


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


def test_weights_are_held_while_they_are_used(
    text: Path, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that share an input, some of which are computed after others have theirs: the same
    bytes as if all of a block's weights were held to its end."""
    save_family(FAMILIES["phi"], tmp_path / "parallel")
    for name, file in beside(as_folder(open_checkpoint(gguf))).items():
        if "tokenizer" in name:
            (tmp_path / "parallel" / name).write_bytes(file.make())  # type: ignore[union-attr]
    quantized(tmp_path / "parallel", "gptq-3", tmp_path / "a", text)
    monkeypatch.setattr(Calibration, "_forget", lambda self, at: None)
    quantized(tmp_path / "parallel", "gptq-3", tmp_path / "b", text)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


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


@pytest.mark.parametrize(("most", "step"), [(16, 1), (3, 2), (1, 4)])
def test_scales_are_looked_for_with_some_of_the_sequences(
    most: int, step: int, folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SEARCH_WITH` of the four at most, evenly."""
    seen = []

    def search(program: Program, wanted: Any, tokens: np.ndarray, *rest: Any) -> dict[int, Any]:
        seen.append(tokens)
        return {}

    monkeypatch.setattr(calibrated, "SEARCH_WITH", most)
    monkeypatch.setattr(scaled, "find_scales", search)
    quantized(folder, "awq-4", tmp_path / "out", text)
    tokenizer = load_tokenizer(open_checkpoint(folder))
    tokens = token_blocks(split("calibration", text), tokenizer, 96, 4)
    assert len(seen) == 1 and np.array_equal(seen[0], tokens[::step])


# -- going on -----------------------------------------------------------------------------------


class Stop(BaseException):
    """What Ctrl-C raises, without its signal."""


def test_goes_on_after_control_c(folder: Path, text: Path, tmp_path: Path) -> None:
    whole = quantized(folder, "awq-4", tmp_path / "whole", text)
    told: list[str] = []
    for seen in (2, 9):  # while scales are found for eight inputs, and after a block
        left = seen

        def stop(size: int) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Stop

        job = job_of(open_checkpoint(folder), find_recipe("awq-4"), tmp_path / "cut", None, text)
        with pytest.raises(Stop):
            job.run(stop, of_runs(told))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["cut.journal", "whole"]
    done = job_of(open_checkpoint(folder), find_recipe("awq-4"), tmp_path / "cut", None, text).run(
        say=of_runs(told)
    )
    assert done.resumed == 1 and told == ["goes on after 1 of 4 blocks"]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert done.losses == whole.losses
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut", "whole"]


def test_goes_on_after_sigkill(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # as many tokens as the command takes of a short text
    short = tmp_path / "short.jsonl"
    short.write_text("\n".join(text.read_text().split("\n")[:4]))
    out = str(tmp_path / "out")
    args = [str(folder), "--recipe", "gptq-4", "--output", out, "--data", str(short)]
    process = subprocess.Popen(
        [*COMMAND, *args], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    first = tmp_path / "out.journal" / "0000.json"
    while not first.exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists() and first.exists()
    done = quantized(folder, "gptq-4", tmp_path / "out", short)
    assert done.resumed >= 1
    quantized(folder, "gptq-4", tmp_path / "whole", short)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(("recipe", "name"), [("gptq-4", "out"), ("q4_0", "out.gguf")])
def test_goes_on_after_its_last_step(
    gguf: Path, folder: Path, text: Path, tmp_path: Path, recipe: str, name: str
) -> None:
    """Interrupted with the model made, before it has its place."""
    source, target = gguf if recipe == "q4_0" else folder, tmp_path / name

    def stop(journal: Journal) -> None:
        raise Stop

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Journal, "publish", stop)
        quantized(source, recipe, target, text)
    assert [p.name for p in tmp_path.iterdir()] == [f"{name}.journal"]
    if recipe == "q4_0":  # without data meanwhile: the journal stays
        job_of(open_checkpoint(gguf), find_recipe(recipe), target).run()
        target.unlink()
    assert quantized(source, recipe, target, text).resumed >= 4
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_begins_anew_where_something_differs(folder: Path, text: Path, tmp_path: Path) -> None:
    def cut(recipe: str, data: Path | None, told: list[str]) -> None:
        job = job_of(open_checkpoint(folder), find_recipe(recipe), tmp_path / "out", "gptq", data)

        def stop(size: int) -> None:
            raise Stop

        with pytest.raises(Stop):
            job.run(stop, of_runs(told))

    told: list[str] = []
    cut("gptq-4", text, told)
    assert told == []
    cut("gptq-3", text, told)
    assert told.pop().endswith("out.journal was of another recipe: begins anew")
    cut("gptq-3", None, told)
    assert told.pop().endswith("was of another text: begins anew")
    (tmp_path / "out.journal" / "journal.json").write_text("damaged")
    cut("gptq-3", None, told)
    assert told == []


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


# -- odd input ----------------------------------------------------------------------------------

DIFFERENT = ("healed-4", "awq-4", "w8a8")  # in how they look at layers
ODD = "model.layers.1.mlp.up_proj.weight"


def test_a_layer_of_zeros_and_one_that_sees_nothing(gguf: Path, text: Path, tmp_path: Path) -> None:
    """Zeros stay zeros; behind an input of zeros, H is singular, layers are rounded to the nearest."""
    dead = ("model.layers.0.self_attn.v_proj.weight", "model.layers.1.input_layernorm.weight")
    source = save_changed(gguf, tmp_path / "dead", lambda n, x: x * (n not in dead))
    for recipe in DIFFERENT:
        done = quantized(source, recipe, tmp_path / recipe, text)
        made = open_checkpoint(done.output).tensors
        assert not dequantize(made[dead[0]]).any()
        for name in ("q_proj", "v_proj"):
            x, y = (
                dequantize(c[f"model.layers.1.self_attn.{name}.weight"])
                for c in (open_checkpoint(source).tensors, made)
            )
            assert ((x - y) ** 2).mean() < 0.012 * (x**2).mean()


def test_weights_that_are_no_numbers(gguf: Path, text: Path, tmp_path: Path) -> None:
    def spoilt(name: str, x: np.ndarray) -> np.ndarray:
        if name == ODD:
            x[3, 5] = np.nan
        return x

    source = save_changed(gguf, tmp_path / "bad", spoilt)
    for recipe in DIFFERENT:
        with pytest.raises(UsageError, match=f"{ODD}: 1 of the weights are not finite"):
            quantized(source, recipe, tmp_path / "out", text)
        assert [p.name for p in tmp_path.iterdir()] == ["bad"]


def test_too_little_text(folder: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    for words in ("a", "a b c d e f " * 20):
        short.write_text(words)
        with pytest.raises(UsageError, match="tokens|too few"):
            quantized(folder, "gptq-4", tmp_path / "out", short)
        assert [p.name for p in tmp_path.iterdir()] == ["short.txt"]


def test_scales_are_learned_with_eight_blocks(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrated, "SEQUENCES", 8)
    short, words = tmp_path / "short.jsonl", text.read_text()[100:]
    parts = [words[i : i + 150] for i in range(0, 1200, 150)]
    short.write_text("\n".join(json.dumps({"text": p}) for p in parts))
    with pytest.raises(UsageError, match="8 of 96 take 768, and as many again") as e:
        quantized(folder, "distilled-4", tmp_path / "out", short)
    assert e.value.suggestions


def test_tokens_are_told_and_blocks_fit_the_context(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrated, "LENGTH", 1 << 20)
    checkpoint, told = open_checkpoint(folder), list[str]()
    context = build_program(checkpoint).context
    job = job_of(checkpoint, find_recipe("gptq-4"), tmp_path / "out", data=text)
    monkeypatch.setattr(calibrated, "SEQUENCES", 1)
    job.run(say=told.append)
    assert f"layers see {context:,} tokens of text" in told


def test_a_model_writes_only_when_it_is_asked(
    folder: Path, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(_: Path) -> list[str]:
        raise AssertionError

    monkeypatch.setattr(written, "written", asked)
    for model, recipe, out in ((folder, "gptq-4", "out"), (gguf, "q8_0", "out.gguf")):
        checkpoint = open_checkpoint(model)
        job = job_of(checkpoint, find_recipe(recipe), tmp_path / out, data=Path("self"))
        assert job.forecast().bytes_after
        with pytest.raises(AssertionError):
            job.run()


def test_a_full_disk(folder: Path, text: Path, tmp_path: Path) -> None:
    """A file that cannot grow: a typed error, and the next run goes on."""

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, 80_000))

    out, short = tmp_path / "out", tmp_path / "short.jsonl"
    short.write_text("\n".join(text.read_text().split("\n")[:4]))
    args = [str(folder), "--recipe", "gptq-4", "--output", str(out), "--data", str(short)]
    failed = subprocess.run(
        [*COMMAND, *args], capture_output=True, text=True, preexec_fn=small_files
    )
    assert failed.returncode == 1 and "cannot write" in failed.stderr
    assert "Traceback" not in failed.stderr and not out.exists()
    assert sorted(os.listdir(tmp_path)) == ["out.journal", "short.jsonl"]
    assert subprocess.run([*COMMAND, *args], capture_output=True).returncode == 0
    assert sorted(os.listdir(tmp_path)) == ["out", "short.jsonl"]


MEMORY = """
import os, sys
from pathlib import Path
import numpy as np
from octavo.backends.torch.spans import Spans
from octavo.checkpoint import open_checkpoint
from octavo.compress.calibration import Calibration
from octavo.compress.conversion import Conversion
from octavo.compress.folder_job import FolderJob
from octavo.compress.journal import Journal
from octavo.compress.recipe_file import find_recipe
from octavo.compress.serving import peak_rss
from octavo.compress.steps import Importance

folder, out, what = sys.argv[1:]
c, out = open_checkpoint(Path(folder)), Path(out)
if what == "calibrate":
    job = FolderJob(c, find_recipe("gptq-4"), out, "gptq")
    tokens = np.random.default_rng(0).integers(0, 320, (2, 16), dtype=np.int32)
    seen = Calibration(c, job.program, job.linear, tokens, Importance(), Journal(out, {}))
    run = lambda: seen.run(lambda n: None)
elif what == "quantize":
    run = FolderJob(c, find_recipe("kv-int8"), out, "compressed-tensors").run
else:
    run = Conversion(c, out, "gguf").run
before = peak_rss(os.getpid())  # ru_maxrss is also that of the process this one was forked from
run()
print(c.nbytes, peak_rss(os.getpid()) - before)
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A folder of 12 layers, and the bytes of one in fp32."""
    folder = tmp_path_factory.mktemp("big")
    wide = replace(SMALL, hidden=512, ffn=1536, heads=8, kv_heads=8, head_dim=64, layers=1)
    save_gguf(wide, folder / "one.gguf", Q.F32)
    one = as_folder(open_checkpoint(folder / "one.gguf"))
    rng = np.random.default_rng(0)
    tensors, layer = {}, 0
    for name, t in one.tensors.items():
        x = (np.array(dequantize(t)) + rng.standard_normal(t.shape) * 1e-3).astype(np.float16)
        copies = [name.replace("layers.0.", f"layers.{i}.") for i in range(12)]
        tensors |= {n: NewTensor.of(x, TensorType.F16) for n in copies}
        layer += t.nbytes if "layers.0." in name else 0
    config = dict(one.metadata) | {"num_hidden_layers": 12}
    write_folder(folder / "big", config, tensors, beside(one))
    return folder / "big", layer


@pytest.mark.parametrize("what", ["calibrate", "quantize", "convert"])
def test_memory(what: str, big: tuple[Path, int], tmp_path: Path) -> None:
    """A model of 12 layers takes the memory of two in fp32, beside what the first use of torch
    does, and not that of its file."""
    folder, layer = big
    out = tmp_path / ("out.gguf" if what == "convert" else "out")
    command = [sys.executable, "-c", MEMORY, str(folder), str(out), what]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    size, grown = map(int, told.split())
    assert size > 5 * layer and grown < 2 * layer + (24 << 20)


# -- recipes of one's own -----------------------------------------------------------------------

OWN = """
summary: 4 bits by GPTQ, 8 in the first layer, keys as they are
method: gptq
formats: [gptq, compressed-tensors, mlx]
weights: {bits: 4, group: 64, symmetric: true}
layers:
  - match: "*.k_proj.weight"
    weights: keep
  - match: [model.layers.0.*]
    weights: {bits: 8, group: 32, symmetric: false}
"""


@pytest.mark.parametrize("layout", ["gptq", "compressed-tensors", "mlx"])
def test_own_recipe(layout: str, folder: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(OWN)
    done = quantized(folder, str(tmp_path / "own.yaml"), tmp_path / "out", text, layout)
    assert done.kept == tuple(f"model.layers.{i}.self_attn.k_proj.weight" for i in range(2))
    before, after = open_checkpoint(folder).tensors, open_checkpoint(done.output).tensors
    for name in done.kept:
        assert (dequantize(before[name]) == dequantize(after[name])).all()
    for loss in done.losses:
        wide = ".layers.0." in loss.name
        x, y = dequantize(before[loss.name]), dequantize(after[loss.name])
        assert after[loss.name].group == (32 if wide else 64)
        assert (((x - y) ** 2).mean() < 1e-4 * (x**2).mean()) == wide


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("formats: [gptq]", "line 1: weights is missing"),
        ("formats: [gptq]\nweights: {bits: 5}", "line 2: 5 bits in groups of 64; 2, 3, 4 or 8 bits"),
        ("formats: [gptq]\nweights: {bits: x}", "line 2: 'x' is no whole number"),
        ("formats: [gptq]\nweights: {bits: 4}\nmethode: gptq", "line 3: unknown entry 'methode'"),
        ("formats: [gptq]\nweights: {bits: 4}\nmethod: best", "line 3: 'best' is none of rtn"),
        ("formats: [exl2]\nweights: {bits: 4}", "line 1: 'exl2' is none of gguf, gptq"),
        ("formats: gptq\nweights: {bits: 4}", "line 1: expected a list"),
        ("formats: [gptq]\nweights: {bits: 4}\nlayers:\n  - weights: keep", "line 4: match is missing"),
        ("formats: [gguf]\nweights: Q4_K", "line 1: file_type is missing"),
        ("formats: [gguf]\nfile_type: 15\nweights: Q4", "line 3: 'Q4' is none of"),
        ("formats: [gguf, awq]\nfile_type: 15\nweights: Q4_K", "line 1: gguf has types of its own"),
        ("formats: [gptq]\nweights: fp8", "line 1: fp8 is stored as compressed-tensors"),
        ("formats: [gptq]\nmethod: smoothquant\nweights: {bits: 8}", "line 2: smoothquant takes activations"),
        ("formats: [gptq]\nweights: {bits: 4}\nactivations: dynamic", "line 3: activations take"),
        ("formats: [gptq]\nweights: {bits: 4}\nformats: [awq]", "line 3: formats is there twice"),
        ("formats: [gptq]\nweights: {bits: 4", "line 2: expected ',' or '}'"),
        ("- a", "line 1: expected entries"),
        ("", "line 1: expected entries"),
        ("&a [*a]", "line 1: expected entries"),
        ("formats: " + "[" * 5000, "not YAML"),
    ],
)  # fmt: skip
def test_recipes_say_the_line(wrong: str, says: str) -> None:
    with pytest.raises(UsageError) as e:
        read_recipe(wrong, "own.yaml")
    assert str(e.value).startswith("own.yaml") and says in str(e.value)


def test_find_recipe(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the recipe"):
        find_recipe(str(tmp_path / "none.yaml"))
    with pytest.raises(UsageError, match="no recipe 'q9'; there are q8_0"):
        find_recipe("q9")


def test_python_api(folder: Path, text: Path, tmp_path: Path) -> None:
    done = octavo.quantize(str(folder), recipe="rtn-4", output=str(tmp_path / "out"), format="mlx")
    assert done.output == tmp_path / "out" and done.bits < 12
    with pytest.raises(AttributeError):
        done.bits = 4  # type: ignore[misc]
    with pytest.raises(WriteError, match="is not empty"):
        octavo.quantize(folder, recipe="rtn-4", output=tmp_path / "out")
    with pytest.raises(UsageError, match="no file or folder"):
        octavo.quantize(folder, recipe="gptq-4", output=tmp_path / "x", data=tmp_path / "none.txt")
