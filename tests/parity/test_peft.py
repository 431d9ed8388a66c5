"""Adapters as PEFT makes them, against PEFT's own arithmetic on transformers' models."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.checkpoint.adapter import read_adapter
from octavo.errors import OctavoError, RequestError
from tests.families import FAMILIES, save_family, save_gguf
from tests.parity.test_lora import engine, make_adapter, request, run

PROMPT = np.random.default_rng(8).integers(3, 320, 40).tolist()
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PATTERNS: dict[str, Any] = {
    "rank_pattern": {"q_proj": 12, r"layers\.[01]\.mlp\.(down|up)_proj": 3, "^model.layers.2.self_attn.o_proj": 1},
    "alpha_pattern": {"self_attn.v_proj": 40, "k_pro.": 1.5, "proj": 7},
}  # fmt: skip
# Family, modules, what else LoraConfig is given.
CASES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "phi3-fused": ("phi3", ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"], {}),
    "phi3-qkv": ("phi3", ["qkv_proj"], {"rank_pattern": {r"layers.1\..*qkv_proj": 20}}),
    "gpt2": ("gpt2", ["c_attn", "c_proj", "c_fc"], {"fan_in_fan_out": True}),
    "gpt2-unsaid": ("gpt2", ["c_attn"], {"fan_in_fan_out": False}),
    "llama-patterns": ("llama", LLAMA, PATTERNS),
    "llama-rslora": ("llama", LLAMA, PATTERNS | {"use_rslora": True}),
    "llama-layers": ("llama", LLAMA, {"layers_to_transform": [0, 2]}),
    "llama-regex": ("llama", r".*\.1\..*_proj", {}),  # type: ignore[dict-item]
    "phi": ("phi", ["q_proj", "dense", "fc1", "fc2"], {}),
    "starcoder2": ("starcoder2", ["q_proj", "c_fc", "c_proj"], {}),
    "opt": ("opt", ["q_proj", "out_proj", "fc1", "fc2"], {}),
}


def trained(model: torch.nn.Module, folder: Path, modules: Any, options: dict[str, Any]) -> Any:
    """PEFT's model around a model, its factors of a noticeable size, saved in `folder`."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(11)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what fan_in_fan_out should be
        config = LoraConfig(
            r=6, lora_alpha=9, target_modules=modules, task_type="CAUSAL_LM", **options
        )
        adapted = get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn_like(p) * 0.4 * p.shape[1] ** -0.5)
    adapted.save_pretrained(folder)
    return adapted


def greedy(adapted: Any, count: int) -> list[tuple[int, float, list[float]]]:
    """Tokens, their log-probabilities and the five best, by transformers and PEFT."""
    ids, out = list(PROMPT), []
    for _ in range(count):
        with torch.no_grad():
            p = torch.log_softmax(adapted(torch.tensor([ids])).logits[0, -1].double(), -1)
        best = int(p.argmax())
        out.append((best, float(p[best]), p.topk(5).values.tolist()))
        ids.append(best)
    return out


@pytest.mark.parametrize("case", CASES)
def test_equal_to_peft(case: str, tmp_path: Path) -> None:
    family, modules, options = CASES[case]
    model = save_family(FAMILIES[family], tmp_path / "model")
    plain = run(engine(tmp_path / "model", False), [request("0", PROMPT)])["0"]
    adapted = trained(model, tmp_path / "adapter", modules, options)
    expected = greedy(adapted, 12)
    sources = [tmp_path / "model"]
    if FAMILIES[family].arch:
        sources.append(tmp_path / "model.gguf")
        save_gguf(FAMILIES[family], tmp_path / "model", tmp_path / "model.gguf")
    for source in sources:
        e = engine(source)
        assert e.adapters is not None
        e.adapters.load("a", tmp_path / "adapter")
        got = run(e, [request("0", PROMPT, "a")])["0"]
        assert [t for t, _, _ in got] == [t for t, _, _ in expected]
        for (_, p, top), (_, q, other) in zip(got, expected, strict=True):
            assert abs(p - q) < 2e-4
            assert max(abs(a - b) for (_, a), b in zip(top, other, strict=True)) < 2e-4
        assert max(abs(p - q) for (_, p, _), (_, q, _) in zip(got, plain, strict=True)) > 1e-2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora True"),
    "bias": ({"bias": "lora_only"}, "bias 'lora_only'"),
    "lora_bias": ({"lora_bias": True}, "lora_bias True"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "target_parameters": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
    "layer_replication": ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
    "trainable tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    "alora": ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
    "arrow": ({"arrow_config": {"top_k": 2}}, "arrow_config"),
    "of the future": ({"use_wora": True}, "use_wora True"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' changes the model"),
    "method": ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
    "rank 0": ({"r": 0}, "r 0; ranks of 1 to 256"),
    "rank 257": ({"r": 257}, "r 257"),
    "rank of text": ({"r": "8"}, "r 8; ranks"),
    "rank of another": ({"r": 4}, r"factors \[8, 92\] and \[60, 8\] for a rank of 4"),
    "rank pattern": ({"rank_pattern": {"q_proj": 4}}, "for a rank of 4"),
    "rank pattern 0": ({"rank_pattern": {"q_proj": 0}}, "rank_pattern 0"),
    "patterns are a list": ({"rank_pattern": ["q_proj"]}, "rank_pattern is no table"),
    "bad expression": ({"alpha_pattern": {"q_(": 4}}, "'q_\\(' is no regular expression"),
    "slow expression": ({"alpha_pattern": {"(a+)+b": 4}}, "repeats too much"),
    "alpha pattern": ({"alpha_pattern": {"q_proj": "4"}}, "alpha_pattern is 4, not a number"),
    "alpha of 400 digits": ({"lora_alpha": 10**400}, "not valid JSON"),
    "alpha of 60 digits": ({"lora_alpha": 10**60}, "beyond 1e\\+30"),
    "alpha NaN": ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    "alpha of text": ({"lora_alpha": None}, "lora_alpha is None"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    changes, reason = REFUSED[case]
    with pytest.raises(OctavoError, match=reason):
        read_adapter(make_adapter(tmp_path / "a", 1, **changes))


def change(folder: Path, edit: Any) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
DAMAGED: dict[str, tuple[Any, str]] = {
    "no B": (lambda t: t.pop(NAME.format("B")), "one of its two factors"),
    "no A": (lambda t: t.pop(NAME.format("A")), "one of its two factors"),
    "twice": (
        lambda t: t.update({NAME.format("A").removeprefix("base_model.model."): torch.ones(8, 60)}), "two factors A",
    ),
    "wrong shape": (lambda t: t.update({NAME.format("B"): torch.ones(60, 7)}), r"\[60, 7\] for a rank of 8"),
    "a vector": (lambda t: t.update({NAME.format("A"): torch.ones(8)}), r"\[8\]"),
    "another type": (lambda t: t.update({NAME.format("A"): torch.ones(8, 60).half()}), "F16, F32"),
    "integers": (
        lambda t: t.update({NAME.format(h): torch.ones(s, dtype=torch.int32) for h, s in (("A", (8, 60)), ("B", (60, 8)))}),
        "I32, I32",
    ),
    "magnitudes": (lambda t: t.update({"x.lora_magnitude_vector": torch.ones(8)}), "lora_magnitude_vector"),
    "biases": (lambda t: t.update({NAME.format("B").replace("weight", "bias"): torch.ones(60)}), "lora_B.bias"),
    "embeddings": (lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(8, 8)}), "lora_embedding_A"),
    "nothing": (lambda t: t.clear(), "is empty"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged(case: str, tmp_path: Path) -> None:
    edit, reason = DAMAGED[case]
    change(make_adapter(tmp_path / "a", 1), edit)
    with pytest.raises(OctavoError, match=reason):
        read_adapter(tmp_path / "a")


def test_factors_that_are_no_numbers(tmp_path: Path) -> None:
    """Refused when loaded; the model answers as before."""
    save_family(FAMILIES["phi3"], tmp_path / "model")
    e = engine(tmp_path / "model")
    assert e.adapters is not None
    before = run(e, [request("0", PROMPT)])["0"]
    modules = {"self_attn.qkv_proj": (64, 128)}
    folder = make_adapter(tmp_path / "a", 1, modules=modules)
    module = "base_model.model.model.layers.1.self_attn.qkv_proj.lora_B.weight"
    change(folder, lambda t: t[module].__setitem__((3, 2), float("inf")))
    with pytest.raises(RequestError, match=r"layers.1.self_attn.qkv_proj are not all finite"):
        e.adapters.load("a", folder)
    wide = make_adapter(tmp_path / "b", 1, modules={"self_attn.qkv_proj": (64, 129)})
    with pytest.raises(RequestError, match="129 x 64; .*qkv_proj has 128 x 64"):
        e.adapters.load("a", wide)
    assert run(e, [request("0", PROMPT)])["0"] == before


def test_the_config_of_a_long_path(tmp_path: Path) -> None:
    with pytest.raises(OctavoError, match="has no adapter_config.json"):
        read_adapter(tmp_path / ("x" * 300))
    (tmp_path / "adapter_config.json").write_text(json.dumps([]))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(OctavoError, match="not a JSON object"):
        read_adapter(tmp_path)
