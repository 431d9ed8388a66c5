"""What is not read is refused by name; what is damaged says where. Folders of one small module."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo.checkpoint import open_checkpoint
from octavo.errors import CheckpointError, ModelNotFound, Unsupported
from octavo.models import build_program
from tests.families import COMMON

NAME = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


def folder(path: Path, tensors: Tensors, **config: Any) -> Path:
    save_file({f"{NAME}.{k}": v for k, v in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} | COMMON | config))
    return path


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def floats(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float16)


GPTQ = {"qweight": ints(16, 64), "qzeros": ints(2, 8), "scales": floats(2, 64)}
PACKED = {
    "weight_packed": ints(64, 16),
    "weight_scale": floats(64, 2),
    "weight_shape": torch.tensor([64, 128]),
}
MLX = {"weight": ints(64, 16).to(torch.uint32), "scales": floats(64, 2), "biases": floats(64, 2)}
METHOD: dict[str, dict[str, Any]] = {
    name: {"quantization_config": {"quant_method": name, "bits": 4, "group_size": 64}}
    for name in ("gptq", "awq", "compressed-tensors", "fp8", "bitsandbytes", "hqq")
}
STATE = {"blocksize": 64, "shape": [4, 96], "quant_type": "nf4", "dtype": "float16"}
NF4 = {
    "weight": torch.zeros((192, 1), dtype=torch.uint8), "weight.absmax": torch.ones(6),
    "weight.quant_map": torch.ones(16),
    "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(STATE).encode()), dtype=torch.uint8),
}  # fmt: skip

REFUSED: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "method": (GPTQ, METHOD["hqq"], r"'hqq'.*quantization_config"),
    "gptq-5-bits": (GPTQ, {"quantization_config": {"quant_method": "gptq", "bits": 5}}, "5 bits"),
    "groups-of-16": (
        GPTQ | {"qzeros": ints(8, 8), "scales": floats(8, 64)},
        METHOD["gptq"],
        "groups of 16 columns",
    ),
    "awq-gemv": (
        GPTQ,
        {"quantization_config": {"quant_method": "awq", "version": "gemv", "bits": 4}},
        "'gemv'",
    ),
    "nvfp4": (
        PACKED | {"weight_global_scale": torch.ones(1)},
        METHOD["compressed-tensors"],
        "nvfp4",
    ),
    "mlx-mode": (MLX, {"quantization": {"bits": 4, "group_size": 64, "mode": "mxfp4"}}, "'mxfp4'"),
    "nf4-rows": (NF4, METHOD["bitsandbytes"], "rows of 96 are not whole blocks of 64"),
    "e5m2": ({"weight": torch.ones(4, 4).to(torch.float8_e5m2)}, {}, "F8_E5M2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    tensors, config, reason = REFUSED[case]
    with pytest.raises(Unsupported, match=reason):
        open_checkpoint(folder(tmp_path, tensors, **config))


DAMAGED: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "no-scales": ({"qweight": ints(16, 64), "qzeros": ints(2, 8)}, METHOD["gptq"], "scales is missing"),
    "scales-of-another-shape": (GPTQ | {"scales": floats(2, 32)}, METHOD["gptq"], "expected"),
    "zeros-of-another-shape": (GPTQ | {"qzeros": ints(3, 8)}, METHOD["gptq"], "qzeros has shape"),
    "g_idx": (GPTQ | {"g_idx": ints(128)}, METHOD["gptq"], "g_idx does not divide"),
    "wrong-type": (GPTQ | {"qweight": floats(16, 64)}, METHOD["gptq"], "expected I32"),
    "awq-zeros": (
        {"qweight": ints(128, 8), "qzeros": ints(1, 8), "scales": floats(2, 64)}, METHOD["awq"], "qzeros"
    ),
    "packed-shape": (
        PACKED | {"weight_shape": torch.tensor([64, 4])}, METHOD["compressed-tensors"], "weight_packed"
    ),
    "packed-shape-absurd": (
        PACKED | {"weight_shape": torch.tensor([64, -5])}, METHOD["compressed-tensors"], "weight_shape"
    ),
    "fp8-scales": (
        {"weight": torch.ones(64, 64).to(torch.float8_e4m3fn), "weight_scale": torch.ones(3, 5)},
        METHOD["fp8"], "weight_scale has shape",
    ),
    "mlx-words": (MLX | {"weight": ints(64, 3).to(torch.uint32)}, {"quantization": {"bits": 4, "group_size": 64}}, "hold no"),
    "nf4-state": (
        NF4 | {"weight.quant_state.bitsandbytes__nf4": torch.tensor([1, 2], dtype=torch.uint8)},
        METHOD["bitsandbytes"], "does not say",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged(case: str, tmp_path: Path) -> None:
    tensors, config, reason = DAMAGED[case]
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(folder(tmp_path, tensors, **config))


def test_fp8_nan(tmp_path: Path) -> None:
    weight = torch.full((64, 64), float("nan")).to(torch.float8_e4m3fn)
    path = folder(tmp_path, {"weight": weight, "weight_scale": torch.ones(1)}, **METHOD["fp8"])
    with pytest.raises(CheckpointError, match="NaN"):
        open_checkpoint(path).tensor(f"{NAME}.weight").raw()


def test_unknown_architecture(tmp_path: Path) -> None:
    path = folder(tmp_path, {"weight": floats(2, 2)}, model_type="rwkv7")
    with pytest.raises(Unsupported, match=r'"rwkv7".*model_type') as e:
        build_program(open_checkpoint(path))
    assert "qwen3_moe" in str(e.value.suggestions)


@pytest.mark.parametrize(
    ("parameters", "error", "reason"),
    [
        ({"rope_type": "spiral", "rope_theta": 1e4}, Unsupported, "'spiral'"),
        ({"rope_type": "yarn", "rope_theta": 1e4}, CheckpointError, "factor"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 0}, CheckpointError, "factor"),
        ({"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [1.0]}, CheckpointError, "8 positive"),
        ({"rope_type": "default", "rope_theta": 0.5}, CheckpointError, "rope base"),
    ],
    ids=lambda x: str(x.get("rope_type")) if isinstance(x, dict) else None,
)  # fmt: skip
def test_rope(
    parameters: dict[str, Any], error: type[Exception], reason: str, tmp_path: Path
) -> None:
    tensors = {"weight": floats(2, 2)}
    path = folder(tmp_path, tensors, rope_parameters=parameters, num_hidden_layers=1)
    with pytest.raises(error, match=reason):
        build_program(open_checkpoint(path))


def test_absurd_sizes(tmp_path: Path) -> None:
    """Refused before anything of that size is made."""
    tensors = {"weight": floats(2, 2)}
    for sizes, reason in (
        ({"num_hidden_layers": 1 << 23}, "8388608 layers, 1 tensors"),
        ({"num_hidden_layers": 1, "head_dim": 1 << 23}, "8388608 dimensions"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            build_program(open_checkpoint(folder(tmp_path, tensors, **sizes)))


NAMED = {
    15: "Q8_K",
    16: "IQ2_XXS",
    23: "IQ4_XS",
    35: "TQ2_0",
    40: "NVFP4",
    99: "of type 99",
}


@pytest.mark.parametrize("kind", NAMED)
def test_types_of_gguf_by_name(kind: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    name = b"blk.0.attn_q.weight"
    table = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 256, kind, 0)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + table + bytes(4096))
    with pytest.raises(Unsupported, match=f"'blk.0.attn_q.weight' is {NAMED[kind]}") as e:
        open_checkpoint(path)
    assert "Q4_K, Q5_0" in e.value.suggestions[0] and "Q4_K_M" in e.value.suggestions[1]


def test_consolidated_weights(tmp_path: Path) -> None:
    """Mistral's own layout is refused by name; beside Hugging Face's files it is not read."""
    weights = {f"{NAME}.weight": torch.ones(64, 64)}
    own = {"layers.0.attention.wq.weight": torch.ones(64, 64)}
    save_file(own, tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text('{"dim": 64}')
    with pytest.raises(Unsupported, match="consolidated.safetensors.*params.json") as e:
        open_checkpoint(tmp_path)
    assert "convert_mistral_weights_to_hf" in e.value.suggestions[0]
    open_checkpoint(folder(tmp_path, {"weight": torch.ones(64, 64)}))
    assert list(open_checkpoint(tmp_path).tensors) == list(weights)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": {f"{NAME}.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    opened = open_checkpoint(tmp_path)
    assert list(opened.tensors) == list(weights)
    assert [p.name for p in opened.sources] == ["model-00001-of-00001.safetensors"]


def test_a_tensor_in_two_files_is_read_from_the_one_the_index_names(tmp_path: Path) -> None:
    folder(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    for part, value in (("a", 1.0), ("b", 2.0)):
        name = f"model-{part}.safetensors"
        save_file({"x": torch.full((2, 2), value), part: torch.ones(2)}, tmp_path / name)
    for part, value in (("a", 1.0), ("b", 2.0)):
        places = {
            "x": f"model-{part}.safetensors",
            "a": "model-a.safetensors",
            "b": "model-b.safetensors",
        }
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": places}))
        assert open_checkpoint(tmp_path).tensor("x").vector().tolist() == [[value] * 2] * 2


def test_weights_under_other_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"x": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelNotFound, match="adapter_model.safetensors, but no model.safetensors"):
        open_checkpoint(tmp_path)


def test_pickled_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"\.bin"):
        open_checkpoint(tmp_path)
