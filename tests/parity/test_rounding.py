"""Models made small: the files are what was forecast, load, and say nearly what the model said."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import load_file

import octavo
from octavo.backends.torch.reference import Reference
from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.base import TensorType
from octavo.checkpoint.dequantize import dequantize
from octavo.compress.quantize import job_of
from octavo.compress.recipe_file import builtin, read_recipe
from octavo.compress.recipes import FolderRecipe, GgufRecipe, Layout, Recipe
from octavo.errors import CheckpointError, UsageError, WriteError
from tests.conftest import Runner
from tests.families import FAMILIES, save_family
from tests.families import save_gguf as save_family_gguf
from tests.parity.test_cpu import Divergence
from tests.small_models import Small, save_hf

RECIPES = builtin()
SMALL = Small(heads=4, kv_heads=2, head_dim=64, hidden=256, ffn=512, layers=8, tied=False)
IDS = np.random.default_rng(0).integers(3, SMALL.vocabulary, 200).tolist()
GGUF = [r for r in RECIPES.values() if isinstance(r, GgufRecipe)]
FOLDERS = [
    (r, layout)
    for r in RECIPES.values()
    if isinstance(r, FolderRecipe) and r.weights is not None and not r.calibrated
    for layout in r.layouts
]


@pytest.fixture(scope="module")
def source(small_gguf: Callable[..., Path]) -> Path:
    return small_gguf(SMALL, Q.F32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "small"
    save_hf(SMALL, path)
    return path


def distance(a: Path, b: Path) -> float:
    """Root mean square of what logits differ by, over that of the logits."""
    x, y = (Runner(p, kv_dtype="f32").logits(IDS) for p in (a, b))
    return float(np.sqrt(((x - y) ** 2).mean() / (x**2).mean()))


def bound(before: Path, after: Path) -> float:
    """Errors of matrices that follow each other are independent: their mean squares, as shares of
    the weights', add up at most."""
    total = 0.0
    made = open_checkpoint(after).tensors
    for name, tensor in open_checkpoint(before).tensors.items():
        x, y = dequantize(tensor), dequantize(made[name])
        total += float(((x - y) ** 2).mean() / (x**2).mean())
    return total**0.5


@pytest.mark.parametrize("recipe", GGUF, ids=lambda r: r.name)
def test_gguf(recipe: GgufRecipe, source: Path, tmp_path: Path) -> None:
    job = job_of(open_checkpoint(source), recipe, tmp_path / "x.gguf")
    told: list[int] = []
    done = job.run(told.append)
    assert done == job.forecast() and sum(told) == job.checkpoint.nbytes
    made = open_checkpoint(done.output)
    assert made.nbytes == done.bytes_after < done.bytes_before / 3
    assert {n: t.type for n, t in made.tensors.items()} == job.types
    assert made.metadata["general.file_type"] == recipe.file_type
    assert {t.tensor_type.name for t in gguf.GGUFReader(done.output).tensors} == set(done.kinds)
    assert 0 < distance(source, done.output) < min(1, bound(source, done.output))


@pytest.mark.parametrize("count", ["8", [8], -1, 1.5])
def test_numbers_of_layers_that_cannot_be(count: Any, source: Path) -> None:
    checkpoint = open_checkpoint(source)
    metadata = {**checkpoint.metadata, "llama.block_count": count}
    job = job_of(replace(checkpoint, metadata=metadata), RECIPES["q4_k_m"], Path("x.gguf"))
    with pytest.raises(CheckpointError, match="block_count"):
        job.forecast()


def test_the_mix_of_q4_k_m(source: Path) -> None:
    """Values and down projections of layers 0, 3, 6 and 7 of eight in more bits, and the head."""
    types = job_of(open_checkpoint(source), RECIPES["q4_k_m"], Path("x.gguf")).types
    more = {n for n, k in types.items() if k is TensorType.Q6_K}
    layers = {f"blk.{i}.{part}.weight" for i in (0, 3, 6, 7) for part in ("attn_v", "ffn_down")}
    assert more == layers | {"output.weight"}
    assert {k for n, k in types.items() if n not in more} == {TensorType.Q4_K, TensorType.F32}


@pytest.mark.parametrize("values", [1024, 4096])
def test_the_mixes_of_two_and_three_bits(values: int) -> None:
    """As llama.cpp's, of a model with 32 layers; values of 1,024 are shared by four queries."""
    shapes = {
        "attn_q": (4096, 4096), "attn_v": (values, 4096), "attn_output": (4096, 4096),
        "ffn_up": (11008, 4096), "ffn_down": (4096, 11008),
    }  # fmt: skip
    found = {
        (name, part): [
            r.type_of(f"blk.{i}.{part}.weight", shape, 32, False).name for i in range(32)
        ]
        for name in ("q2_k", "q3_k_m")
        for part, shape in shapes.items()
        if isinstance(r := RECIPES[name], GgufRecipe)
    }
    assert found == {
        ("q2_k", "attn_q"): ["Q2_K"] * 32,
        ("q2_k", "attn_v"): ["Q4_K" if values == 1024 else "Q3_K"] * 32,
        ("q2_k", "attn_output"): ["Q3_K"] * 32,
        ("q2_k", "ffn_up"): ["Q2_K"] * 32,
        ("q2_k", "ffn_down"): ["Q3_K"] * 32,
        ("q3_k_m", "attn_q"): ["Q3_K"] * 32,
        ("q3_k_m", "attn_v"): ["Q5_K"] * 2 + ["Q4_K"] * 30,
        ("q3_k_m", "attn_output"): ["Q4_K"] * 32,
        ("q3_k_m", "ffn_up"): ["Q3_K"] * 32,
        ("q3_k_m", "ffn_down"): ["Q5_K"] * 2 + ["Q4_K"] * 30,
    }


@pytest.mark.parametrize(("recipe", "layout"), FOLDERS, ids=lambda v: getattr(v, "name", v))
def test_folders(recipe: FolderRecipe, layout: Layout, folder: Path, tmp_path: Path) -> None:
    job = job_of(open_checkpoint(folder), recipe, tmp_path / "out", layout)
    done = job.run()
    made = open_checkpoint(done.output)
    assert done == job.forecast() and made.nbytes == done.bytes_after
    assert len(job.linear) == 7 * SMALL.layers and not done.kept
    for name, tensor in job.checkpoint.tensors.items():
        before, after = dequantize(tensor), dequantize(made.tensors[name])
        if name in job.linear:
            lost = ((before - after) ** 2).mean() / (before**2).mean()
            assert 0 < lost < (0.012 if recipe.name == "rtn-4" else 0.001)
        else:
            assert np.array_equal(before, after)
    assert 0 < distance(folder, done.output) < bound(folder, done.output) < 1
    assert (done.output / "generation_config.json").read_bytes() == (
        folder / "generation_config.json"
    ).read_bytes()


def test_gptqmodel_takes_grids_with_zeros(folder: Path, tmp_path: Path) -> None:
    """It reads them of those that call themselves GPTQModel 0.9.0 or later; whether the weights are
    the same: benchmarks/loaders.py. Zeros of 0, for which it asks, are not in the file."""
    job = job_of(open_checkpoint(folder), RECIPES["rtn-4"], tmp_path / "out", "gptq")
    out = job.run().output
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["sym"] is False
    makers = dict(each.split(":") for each in config["meta"]["quantizer"])
    assert tuple(map(int, makers["gptqmodel"].split("."))) >= (0, 9, 0)
    assert makers["octavo"] == octavo.__version__
    stored = 0
    for name, tensor in load_file(out / "model.safetensors").items():
        if name.endswith("qzeros"):  # one less than they are, eight in a word
            zeros = (tensor[..., None] >> np.arange(0, 32, 4)) & 15
            assert (zeros < 15).all()
            stored += 1
    assert stored == len(job.linear)


SYMMETRIC = """
formats: [compressed-tensors]
weights: {bits: 4, group: 64, symmetric: true}
"""


@pytest.mark.parametrize(
    "recipe", [RECIPES["rtn-8"], read_recipe(SYMMETRIC, "own")], ids=lambda r: r.name
)
def test_transformers_reads_what_we_write(recipe: Recipe, folder: Path, tmp_path: Path) -> None:
    """compressed-tensors, which transformers loads on a CPU: the weights that we read, bit by bit,
    and their logits."""
    from transformers import AutoModelForCausalLM

    job = job_of(open_checkpoint(folder), recipe, tmp_path / "out", "compressed-tensors")
    out = job.run().output
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    made, ids = open_checkpoint(out), torch.tensor([IDS])
    with torch.no_grad():
        assert (theirs(ids).logits - ours(ids).logits).abs().max() > 1e-3
        for name in job.linear:
            values = torch.from_numpy(dequantize(made.tensors[name]).copy())
            assert torch.equal(theirs.get_parameter(name), values)
            ours.get_parameter(name).copy_(values)
        assert (theirs(ids).logits - ours(ids).logits).abs().max() < 1e-4


KEPT = {"gate_proj", "up_proj", "down_proj"}  # 80 outputs or inputs are no whole 32s


def test_layers_that_do_not_divide(tmp_path: Path) -> None:
    """Groups shrink to what divides; a layer that no group divides stays as it is."""
    odd = Small(heads=4, kv_heads=2, head_dim=16, hidden=96, ffn=80, layers=1)
    save_hf(odd, tmp_path / "odd")
    job = job_of(open_checkpoint(tmp_path / "odd"), RECIPES["rtn-4"], tmp_path / "out", "gptq")
    done = job.run()
    assert done.group == 32
    assert {name.split(".")[-2] for name in done.kept} == KEPT
    assert 0 < distance(tmp_path / "odd", done.output) < 1


def test_what_is_not_rounded(tmp_path: Path) -> None:
    """GPT-2's transposed matrices are refused; biases of experts and tables stay floats; a name with
    dots is a folder's; files in folders come along."""
    save_family(FAMILIES["gpt2"], tmp_path / "gpt2")
    assert "lie transposed or stacked" in refusal(
        open_checkpoint(tmp_path / "gpt2"), RECIPES["rtn-4"], tmp_path / "out"
    )
    q4 = RECIPES["q4_k_m"]
    assert isinstance(q4, GgufRecipe)
    kinds = {
        "blk.0.ffn_down_exps.bias": TensorType.F32, "position_embd.weight": TensorType.F32,
        "blk.0.ffn_gate_inp.weight": TensorType.F32, "blk.0.ffn_up_exps.weight": TensorType.Q4_K,
        "blk.7.ffn_down_exps.weight": TensorType.Q6_K,
    }  # fmt: skip
    for name, kind in kinds.items():
        assert q4.type_of(name, (4, 256, 256), 8, False) is kind
    assert q4.type_of("blk.0.ffn_up.weight", (4, 40), 8, False) is TensorType.BF16
    save_hf(Small(layers=1), tmp_path / "Small-1.5B")
    (tmp_path / "Small-1.5B" / "1_Pooling").mkdir()
    (tmp_path / "Small-1.5B" / "1_Pooling" / "config.json").write_text("{}")
    out = tmp_path / "Small-1.5B-4bit"
    job_of(open_checkpoint(tmp_path / "Small-1.5B"), RECIPES["rtn-4"], out, "mlx").run()
    assert (out / "1_Pooling" / "config.json").read_text() == "{}"
    assert "is quantized already" in refusal(
        open_checkpoint(out), RECIPES["rtn-4"], tmp_path / "twice"
    )


@pytest.mark.parametrize("name", ["q2_k", "q3_k_m"])
def test_experts_of_two_and_three_bits(name: str, tmp_path: Path) -> None:
    """What is made of experts runs as the reference computes it from the rounded weights."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    family = replace(FAMILIES["olmoe"], settings=FAMILIES["olmoe"].settings | wide)
    save_family(family, tmp_path)
    save_family_gguf(family, tmp_path, tmp_path / "moe.gguf")
    job = job_of(open_checkpoint(tmp_path / "moe.gguf"), RECIPES[name], tmp_path / "small.gguf")
    experts = {k.name for n, k in job.types.items() if "_exps" in n}
    assert experts == ({"Q2_K", "Q3_K"} if name == "q2_k" else {"Q3_K", "Q4_K"})
    runner, d = Runner(job.run().output, kv_dtype="f32"), Divergence()
    d.add(Reference(runner.program).logits(IDS), runner.logits(IDS), IDS)
    d.check()


def test_routers_stay_as_they_are(tmp_path: Path) -> None:
    save_family(FAMILIES["olmoe"], tmp_path / "moe")
    job = job_of(open_checkpoint(tmp_path / "moe"), RECIPES["rtn-8"], tmp_path / "out", "gptq")
    routers = {n for n in job.checkpoint.tensors if n.endswith("mlp.gate.weight")}
    assert routers and routers.isdisjoint(job.layers)
    assert any("o_proj" in name for name in job.layers)


def test_what_a_token_reads(tmp_path: Path) -> None:
    """All matrices but the table of embeddings, of experts those that tokens are routed to; as many
    bytes as the forecast says are in what is made."""
    family = FAMILIES["olmoe"]
    save_family(family, tmp_path / "moe")
    job = job_of(open_checkpoint(tmp_path / "moe"), RECIPES["int8-dynamic"], tmp_path / "out")
    done = job.run()
    of_all = family.settings["num_experts_per_tok"] / family.settings["num_experts"]
    shares = {".experts.": of_all, "embed_tokens": 0.0, "norm": 0.0}
    for path, told in zip((done.source, done.output), done.reads, strict=True):
        read = 0.0
        for name, t in open_checkpoint(path).tensors.items():
            read += t.nbytes * next((s for part, s in shares.items() if part in name), 1.0)
        assert told == round(read) > 0


def test_weights_that_are_no_numbers(folder: Path, tmp_path: Path) -> None:
    """They are refused by name in every layout, and nothing is left behind."""
    from safetensors.torch import load_file, save_file

    bad = tmp_path / "bad"
    shutil.copytree(folder, bad)
    weights = load_file(bad / "model.safetensors")
    name = "model.layers.3.mlp.up_proj.weight"
    weights[name][5, 7] = torch.nan
    save_file(weights, bad / "model.safetensors", metadata={"format": "pt"})
    for recipe, layout in FOLDERS:
        with pytest.raises(UsageError, match=f"{name}: 1 of the weights are not finite"):
            job_of(open_checkpoint(bad), recipe, tmp_path / "out", layout).run()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["bad"]


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(UsageError) as e:
        job_of(*args, **kwargs)
    return str(e.value)


def test_refusals(source: Path, folder: Path, tmp_path: Path) -> None:
    one, other = open_checkpoint(source), open_checkpoint(folder)
    out, q4, rtn = tmp_path / "x.gguf", RECIPES["q4_k_m"], RECIPES["rtn-4"]
    assert refusal(other, q4, out) == "q4_k_m makes GGUF files of GGUF files; small is a folder"
    assert "does not end with .gguf" in refusal(one, q4, tmp_path / "x")
    assert "q4_k_m is not stored as gptq" in refusal(one, q4, out, "gptq")
    for name, says in (
        ("gptq-3", "gptq-3 is not stored as gguf: layers of 4 or 8 bits become Q4_0 or Q8_0"),
        ("fp8", "says nothing of activations"),
        ("int8-dynamic", "says nothing of activations"),
    ):
        assert says in refusal(one, RECIPES[name], out, "gguf")
    assert "does not end with .gguf" in refusal(one, rtn, tmp_path / "x", "gguf")
    out.mkdir()
    with pytest.raises(WriteError, match="is a folder; name a new file"):
        job_of(one, rtn, out, "gguf")
    out.rmdir()
    assert "rtn-4 looks at no data" in refusal(other, rtn, tmp_path / "x", None, out)
    assert "no format 'exl2'" in refusal(other, rtn, tmp_path / "x", "exl2")
    assert "fp8 is not stored as awq; compressed-tensors, safetensors are" in refusal(
        other, RECIPES["fp8"], tmp_path / "x", "awq"
    )
    assert "is no name for a folder" in refusal(other, rtn, tmp_path / "x.gguf")
    with pytest.raises(WriteError, match="is not empty; name a new folder"):
        job_of(other, rtn, folder).run()
    done = job_of(other, rtn, tmp_path / "four").run()
    small = open_checkpoint(done.output)
    assert "four is quantized already" in refusal(small, rtn, tmp_path / "twice")


def test_the_command(source: Path, tmp_path: Path) -> None:
    def quantize(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "octavo.cli.main", "quantize", *args]
        return subprocess.run(command, capture_output=True, text=True)

    listed = quantize("--list")
    assert listed.returncode == 0 and all(name in listed.stdout for name in RECIPES)
    out = tmp_path / "x.gguf"
    args = [str(source), "--recipe", "q8_0", "--output", str(out), "--json"]
    told = json.loads(quantize(*args, "--dry-run").stdout)
    assert not out.exists()
    done = quantize(*args)
    assert done.returncode == 0 and json.loads(done.stdout) == told
    assert open_checkpoint(out).nbytes == told["bytes_after"]
    again = quantize(*args)
    assert again.returncode == 2 and again.stderr.startswith(f"error: {out} is there already")
    assert "--force" in again.stderr and quantize(*args, "--force").returncode == 0
    folder = tmp_path / "hf"
    assert quantize(str(source), "--recipe", "rtn-8", "--format", "safetensors", "--output", str(folder)).returncode == 0  # fmt: skip
    for model, *given in (
        (folder, "--recipe", "q4_0", "--output", str(tmp_path / "y.gguf")),
        (folder, "--output", str(tmp_path / "y")),
        (folder, "--output", str(tmp_path / "y.gguf"), "--format", "mlx"),
        (folder, "--recipe", "rtn-4", "--format", "gguf", "--output", str(tmp_path / "y")),
        (source, "--output", str(tmp_path / "y")),
        (source, "--recipe", "rtn-4", "--format", "gguf", "--output", str(tmp_path / "y")),
    ):  # what is suggested does what it says
        refused = quantize(str(model), *given)
        hint = refused.stderr.strip().splitlines()[-1].partition("try: octavo quantize ")[2]
        assert refused.returncode == 2 and hint
        pasted = quantize(*shlex.split(hint), "--dry-run")
        assert pasted.returncode == 0, (hint, pasted.stderr)
    wrong = quantize(str(source), "--recipe", "q9", "--output", str(out))
    assert wrong.returncode == 2 and "no recipe 'q9'; there are q8_0" in wrong.stderr
