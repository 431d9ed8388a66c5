"""Every stored format: bit for bit what the package that owns it reads, and packed kernels on that."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo.backends.torch.reference import Reference
from octavo.checkpoint import Tensor, open_checkpoint
from octavo.checkpoint.base import FLOATS, PACKED
from octavo.checkpoint.dequantize import dequantize
from octavo.checkpoint.quantized import import_quantized
from octavo.checkpoint.safetensors import read_safetensors
from octavo.models import build_program
from octavo.text import load_tokenizer
from tests.conftest import Runner, real_text
from tests.families import FAMILIES, VOCABULARY, save_family
from tests.parity.test_cpu import Divergence
from tests.parity.test_reference import LIMIT
from tests.quantized_models import WRITERS, Tensors, quantize_folder
from tests.small_models import Small, save_hf, write_config

LAST_PLACE = {"bnb-int8"}  # two roundings there, one here


def linears(name: str) -> bool:
    return "proj" in name


def dense(tensor: Tensor) -> torch.Tensor:
    """In fp32, columns in the order of the inputs."""
    values = torch.from_numpy(dequantize(tensor))
    if tensor.order is None:
        return values
    return torch.empty_like(values).index_copy(1, torch.tensor(tensor.order), values)


def check(format: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
    if format in LAST_PLACE:
        step = torch.finfo(expected.dtype).eps * expected.abs().max()
        assert (ours.to(expected.dtype) - expected).abs().max() <= step
    else:
        assert torch.equal(ours.to(expected.dtype), expected)


def save(tensors: Tensors, folder: Path) -> None:
    save_file(tensors, folder / "model.safetensors")


def real_weights(path: Path) -> Tensors:
    tensors = open_checkpoint(path).tensors
    gate, down = (dequantize(tensors[f"blk.3.ffn_{part}.weight"]) for part in ("gate", "down"))
    return {
        "a.gate_proj": torch.from_numpy(gate[:512]),
        "a.down_proj": torch.from_numpy(down[:512]),
    }


@pytest.mark.parametrize("format", WRITERS)
@pytest.mark.parametrize("source", ["random", "smollm2"])
def test_dequantized_bits(
    source: str, format: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Rounded to the type in which the owner computes, every weight has the same bits."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"a.q_proj": (96, 256), "a.down_proj": (256, 384)}
    weights = {n: torch.randn(s, generator=generator) * 0.1 for n, s in shapes.items()}
    if source == "smollm2":
        weights = real_weights(request.getfixturevalue("smollm2"))
        if "128" in format or "asym" in format or "block" in format or format == "mlx-8":
            del weights["a.gate_proj"]  # 576 columns are no whole groups of 128
    written = WRITERS[format](weights)
    save(written.tensors, tmp_path)
    got = import_quantized(read_safetensors(tmp_path / "model.safetensors"), written.config)
    assert got.keys() == {f"{name}.weight" for name in weights}
    for name, expected in written.dequantized.items():
        tensor = got[f"{name}.weight"]
        assert tensor.type in PACKED and tensor.type not in FLOATS
        check(format, dense(tensor), expected)
        assert np.array_equal(dequantize(tensor.rows(16, 50)), dequantize(tensor)[16:50])


@pytest.mark.parametrize("format", WRITERS)
def test_small_models(format: str, tmp_path: Path) -> None:
    """A folder in the format: the weights, all of it against transformers, then the kernels."""
    small = Small(heads=4, kv_heads=2, head_dim=32, hidden=128, ffn=256)
    oracle = save_hf(small, tmp_path)
    weights = quantize_folder(tmp_path, WRITERS[format], linears)
    checkpoint = open_checkpoint(tmp_path)
    with torch.no_grad():
        for name, expected in weights.items():
            ours = dense(checkpoint.tensor(f"{name}.weight"))
            check(format, ours, expected)
            oracle.get_parameter(f"{name}.weight").copy_(ours)
    program = build_program(checkpoint)
    rng = np.random.default_rng(1)
    # With an fp32 cache only the kernels differ: random logits stand close to ties.
    reference, runner, d = Reference(program), Runner(tmp_path, kv_dtype="f32"), Divergence()
    for _ in range(3):
        ids = rng.integers(3, small.vocabulary, 500).tolist()
        expected = reference.logits(ids)
        with torch.inference_mode():
            assert (oracle(torch.tensor([ids])).logits[0] - expected).abs().max() <= LIMIT
        d.add(expected, runner.logits(ids), ids)
    d.check()


@pytest.fixture(scope="session")
def smollm2_folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as transformers reads its GGUF file, saved as a folder."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("smollm2")
    read = AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.bfloat16
    )
    config = copy.deepcopy(read.config)
    del config.quantization_config  # with which it would not be saved
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "format", ["gptq-4", "gptq-4-act-order", "awq", "ct-int8", "fp8-row", "nf4", "mlx-4"]
)
def test_real_model(format: str, smollm2_folder: Path, smollm2: Path, tmp_path: Path) -> None:
    """All of SmolLM2 in a format, on text: the packed kernels against the dequantized weights."""
    folder = tmp_path / "model"
    shutil.copytree(smollm2_folder, folder)
    quantize_folder(folder, WRITERS[format], linears)
    ids = load_tokenizer(open_checkpoint(smollm2)).encode(real_text(6000))
    runner, d = Runner(folder), Divergence()
    reference = Reference(runner.program)
    for i in range(2):
        document = ids[i * 512 : (i + 1) * 512]
        assert len(document) == 512
        d.add(reference.logits(document), runner.logits(document), document)
    d.check()


def _mxfp4(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """A stack of matrices `[experts, inputs, outputs]` as gpt-oss stores it, and its values again."""
    upright = w.float().transpose(1, 2).unflatten(2, (-1, 32))
    exponent = (upright.abs().amax(-1).clamp(min=1e-20).log2().floor() - 2).clamp(-100, 100)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    scaled = upright / exponent.exp2()[..., None]
    codes = (scaled[..., None] - table).abs().argmin(-1)
    pairs = codes.unflatten(-1, (16, 2))
    blocks = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
    values = table[codes] * exponent.exp2()[..., None]
    scales = (exponent + 127).to(torch.uint8)
    return {"blocks": blocks, "scales": scales}, values.flatten(2).transpose(1, 2)


def published_gpt_oss(folder: Path) -> torch.nn.Module:
    """Saves a folder as gpt-oss is published, experts in MXFP4, the rest in floats; the same in
    transformers."""
    from safetensors.torch import load_file

    oracle = save_family(FAMILIES["gpt-oss"], folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        parts, values = _mxfp4(tensors.pop(name))
        tensors |= {f"{name}_{kind}": part for kind, part in parts.items()}
        with torch.no_grad():
            oracle.get_parameter(name).copy_(values)
    save({n: t.contiguous() for n, t in tensors.items()}, folder)
    write_config(folder, quantization_config={"quant_method": "mxfp4"})
    return oracle


def test_gpt_oss_mxfp4(tmp_path: Path) -> None:
    oracle = published_gpt_oss(tmp_path)
    ids = np.random.default_rng(1).integers(3, VOCABULARY, 300).tolist()
    runner, d = Runner(tmp_path, kv_dtype="f32"), Divergence()
    expected = Reference(runner.program).logits(ids)
    with torch.inference_mode():
        assert (oracle(torch.tensor([ids])).logits[0] - expected).abs().max() <= LIMIT
    d.add(expected, runner.logits(ids), ids)
    d.check()


def test_partly_quantized_in_shards(tmp_path: Path) -> None:
    """Some modules quantized, others not, the parts of a module spread over two files."""
    from safetensors.torch import load_file

    small = Small(heads=4, kv_heads=2, head_dim=32, hidden=128, ffn=256, tied=False)
    oracle = save_hf(small, tmp_path)
    weights = quantize_folder(
        tmp_path, WRITERS["gptq-4"], lambda name: "k_proj" in name or "up_proj" in name
    )
    with torch.no_grad():
        checkpoint = open_checkpoint(tmp_path)
        for name in weights:
            oracle.get_parameter(f"{name}.weight").copy_(dense(checkpoint.tensor(f"{name}.weight")))
    whole = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    shards = {f"model-0000{i + 1}-of-00002.safetensors": sorted(whole)[i::2] for i in range(2)}
    for file, names in shards.items():
        save_file({n: whole[n] for n in names}, tmp_path / file)
    index = {"weight_map": {n: file for file, names in shards.items() for n in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    ids = np.random.default_rng(1).integers(3, small.vocabulary, 200).tolist()
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    assert (
        expected - Reference(build_program(open_checkpoint(tmp_path))).logits(ids)
    ).abs().max() <= LIMIT
    assert len(Runner(tmp_path).logits(ids)) == 200
