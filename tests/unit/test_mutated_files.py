"""Every value of a model's JSON files replaced by bad ones: typed errors, in little time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.adapter import read_adapter
from tests.mutations import BAD, document, outcome, places, replaced
from tests.parity.test_encoders import dense, modules, small_encoder
from tests.parity.test_lora import make_adapter
from tests.small_models import Small, save_gguf, save_hf
from tests.unit.test_refusals import GPTQ, MLX, NAME, PACKED, floats, folder, ints

FRAME = {
    "bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "chat_template": "{{ messages }}",
    "added_tokens_decoder": {"0": {"content": "<s>"}}, "add_bos_token": True,
}  # fmt: skip


def tokenizer(folder: Path) -> None:
    """One with a part of every kind."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *alphabet, "ab", "abc"]
    merges = [("a", "b"), ("ab", "c")]
    t = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, merges))
    t.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("x", "y")])
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(" ", "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", 0)]
    )
    t.add_special_tokens(["<s>", "</s>"])
    t.enable_truncation(8)
    t.enable_padding(length=4)
    t.save(str(folder / "tokenizer.json"))


def mutate(folder: Path, *names: str) -> None:
    command = [sys.executable, "-m", "tests.mutations", str(folder), *names]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    *wrong, last = run.stdout.splitlines() or [""]
    assert (run.returncode, wrong) == (0, []), run.stderr[-2000:]
    assert int(last.removeprefix("tried ")) > 20 * (len(names) or 20)


CONFIG: dict[str, Any] = {"generation_config.json": {"eos_token_id": [2, 1], "temperature": 0.5}}


FILES = [
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
    "model.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_decoder(name: str, tmp_path: Path) -> None:
    save_hf(Small(layers=1, hidden=32, ffn=32, heads=2), tmp_path)
    tokenizer(tmp_path)
    for file, content in (CONFIG | {"tokenizer_config.json": FRAME}).items():
        (tmp_path / file).write_text(json.dumps(content))
    mutate(tmp_path, name)


@pytest.mark.parametrize(
    "names",
    [
        ["config.json"],
        ["modules.json", "1_Pooling/config.json", "2_Dense/config.json", "config_sentence_transformers.json"],
    ],
    ids=["config", "modules"],
)  # fmt: skip
def test_encoder(names: list[str], tmp_path: Path) -> None:
    small_encoder(tmp_path, "bert", head=False)
    modules(tmp_path, {"pooling_mode": "mean"}, dense(60, 16, "Tanh", True), "Normalize")
    prompts = {"prompts": {"q": "query: "}, "default_prompt_name": "q"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    mutate(tmp_path, *names)


def test_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    save_gguf(Small(layers=1), path, Q.Q4_0)
    mutate(path)


SETTINGS: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
    "gptq": (GPTQ, {"bits": 4, "group_size": 64, "desc_act": False, "checkpoint_format": "gptq"}),
    "awq": (
        {"qweight": ints(128, 8), "qzeros": ints(2, 8), "scales": floats(2, 64)},
        {"bits": 4, "group_size": 64, "version": "gemm"},
    ),
    "compressed-tensors": (
        PACKED,
        {"config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 64, "block_structure": None}}}},
    ),
    "fp8": (
        {"weight": torch.ones(64, 128).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 1)},
        {"weight_block_size": [128, 128]},
    ),
    "mlx": (MLX, {"bits": 4, "group_size": 64, "mode": "affine", NAME: {"bits": 4, "group_size": 64}}),
}  # fmt: skip


@pytest.mark.parametrize("method", SETTINGS)
def test_quantized(method: str, tmp_path: Path) -> None:
    """The settings of one module; what else the model needs is missing, which is found out later."""
    tensors, settings = SETTINGS[method][0], {"quant_method": method} | SETTINGS[method][1]
    path = tmp_path / "model"
    path.mkdir()
    for at in places(settings):
        for bad in BAD:
            config = replaced(settings, at, bad)
            folder(path, tensors, quantization_config=config)
            assert not outcome(lambda: read_all(path)), (at, bad)


def test_adapter(tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 2.0}}
    modules = {"self_attn.q_proj": (60, 60)}
    folder = make_adapter(tmp_path / "a", 1, modules=modules, layers=1, **patterns)
    read_adapter(folder)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        value, written = document(folder / name)
        good = (folder / name).read_bytes()
        for at in places(value):
            for bad in BAD:
                (folder / name).write_bytes(written(replaced(value, at, bad)))
                assert not outcome(lambda: read_adapter(folder)), (name, at, bad)
        (folder / name).write_bytes(good)


def read_all(path: Path) -> None:
    for tensor in open_checkpoint(path).tensors.values():
        tensor.raw()
