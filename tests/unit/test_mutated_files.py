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
from octavo.errors import OctavoError
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

BNB_STATE = {"blocksize": 64, "shape": [64, 128], "nested_blocksize": 256, "nested_offset": 0.5}
MODULES: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
    **SETTINGS,
    "gptq act-order": (GPTQ | {"g_idx": (torch.arange(128) // 64).int()}, {"bits": 4, "group_size": 64}),
    "compressed-tensors zeros": (
        PACKED | {"weight_zero_point": ints(8, 2), "weight_g_idx": (torch.arange(128) // 64).int()},
        SETTINGS["compressed-tensors"][1],
    ),
    "compressed-tensors int8": (
        {"weight": torch.ones(64, 128).to(torch.int8), "weight_scale": torch.ones(64, 1),
         "weight_zero_point": torch.zeros(64, 1).to(torch.int8)},
        {"config_groups": {"g": {"weights": {"num_bits": 8}}}},
    ),
    "compressed-tensors mxfp4": (
        {"weight_packed": torch.zeros(64, 64, dtype=torch.uint8), "weight_scale": torch.zeros(64, 4, dtype=torch.uint8)},
        {},
    ),
    "compressed-tensors fp8": (
        {"weight": torch.ones(64, 128).to(torch.float8_e4m3fn), "weight_scale": torch.ones(64, 1)}, {}
    ),
    "bitsandbytes nf4": (
        {"weight": torch.zeros((4096, 1), dtype=torch.uint8), "weight.absmax": torch.zeros(128, dtype=torch.uint8),
         "weight.nested_absmax": torch.ones(1), "weight.nested_quant_map": torch.ones(256),
         "weight.quant_map": torch.ones(16),
         "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(BNB_STATE).encode()), dtype=torch.uint8)},
        {},
    ),
    "bitsandbytes int8": ({"weight": torch.zeros((64, 128), dtype=torch.int8), "SCB": torch.ones(64)}, {}),
    "mxfp4": (
        {f"{part}_{kind}": torch.zeros(shape, dtype=torch.uint8)
         for part in ("gate_up_proj", "down_proj")
         for kind, shape in (("blocks", (2, 64, 2, 16)), ("scales", (2, 64, 2)))},
        {},
    ),
}  # fmt: skip
GOOD_TOO = {  # a smaller matrix, or one scale for all of it, as files may have them
    ("gptq", "qweight", "fewer"), ("awq", "qweight", "fewer"), ("fp8", "weight", "fewer"), ("fp8", "weight", "more"),
    ("fp8", "weight_scale_inv", "scalar"), ("compressed-tensors fp8", "weight_scale", "scalar"),
    ("compressed-tensors int8", "weight_scale", "scalar"), ("compressed-tensors int8", "weight_zero_point", "scalar"),
}  # fmt: skip


def damaged(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is left of a tensor whose shape nothing may have."""
    return {
        "scalar": tensor.reshape(-1)[0], "empty": tensor[:0], "deeper": tensor[..., None],
        "fewer": tensor[:-1], "more": torch.cat([tensor, tensor[:1]]),
    }  # fmt: skip


def reshaped(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The same numbers in shapes that some formats have and some have not."""
    n = tensor.numel()
    return [tensor.reshape(shape) for shape in ((n,), (1, n), (n, 1))] + [tensor.reshape(-1)[:1]]


@pytest.mark.parametrize("kind", MODULES)
def test_shapes_of_quantized_modules(kind: str, tmp_path: Path) -> None:
    """Each tensor damaged, one by one: refused in a line that names the tensor where its own shape
    is none it can have, and its module where it does not fit the others."""
    tensors, settings = MODULES[kind]
    config = {"quantization_config": {"quant_method": kind.split()[0]} | settings}
    read_all(folder(tmp_path, tensors, **config))
    for ending, tensor in tensors.items():
        for what, bad in damaged(tensor).items():
            path = folder(tmp_path, tensors | {ending: bad.contiguous()}, **config)
            if (kind, ending, what) in GOOD_TOO:
                read_all(path)
                continue
            with pytest.raises(OctavoError) as e:
                read_all(path)
            own = what in ("scalar", "empty", "deeper")
            assert (f"{NAME}.{ending}" if own else NAME) in str(e.value), (ending, what)
            assert "\n" not in str(e.value)
        for other in reshaped(tensor):
            path = folder(tmp_path, tensors | {ending: other.contiguous()}, **config)
            assert not outcome(lambda p=path: read_all(p)), (ending, other.shape)  # type: ignore[misc]


STATES = [
    {"nested_offset": "x"}, {"nested_offset": [1.0]}, {"nested_blocksize": 1 << 62},
    {"nested_blocksize": 0}, {"blocksize": 1 << 62}, {"shape": [1 << 62, 128]}, {"shape": 64},
]  # fmt: skip


@pytest.mark.parametrize("change", STATES, ids=str)
def test_states_of_bitsandbytes(change: dict[str, Any], tmp_path: Path) -> None:
    state = torch.tensor(list(json.dumps(BNB_STATE | change).encode()), dtype=torch.uint8)
    tensors = MODULES["bitsandbytes nf4"][0] | {"weight.quant_state.bitsandbytes__nf4": state}
    path = folder(tmp_path, tensors, quantization_config={"quant_method": "bitsandbytes"})
    assert not outcome(lambda: read_all(path))


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
