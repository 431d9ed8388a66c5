"""A small random model of every family, as transformers saves it and as a GGUF file.

GGUF names come from the `gguf` package's own table; what llama.cpp's converter does to weights
(rows of q and k, norms plus one, stacked experts) is stated here once more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q

from tests.small_models import add_vocabulary

VOCABULARY = 320
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.5 + 0.3 * i for i in range(8)],
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """model_type and settings for transformers; arch: its GGUF name, "" where there is none."""

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    arch: str = ""

    def build(self) -> torch.nn.Module:
        """In fp32, with weights that keep the scale of what passes through."""
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(3)
        config = AutoConfig.for_model(self.model_type, **self.settings)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        offset = 0.0 if self.model_type.startswith("gemma") else 1.0
        with torch.no_grad():
            for name, p in model.named_parameters():
                transposed = (self.model_type == "gpt2" and ".c_" in name) or ".experts." in name
                vector = p.ndim == 1 or name.endswith("_bias")
                fan = (
                    25
                    if vector
                    else p.shape[-2]
                    if transposed and self.model_type != "mixtral"
                    else p.shape[-1]
                )
                p.copy_(torch.randn_like(p) * fan**-0.5)
                if p.ndim == 1 and name.endswith("weight"):
                    p.add_(offset)
                if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                    p.mul_(4)  # a router's choices are far from ties, as trained ones' are
        return model


def _small(**changes: Any) -> dict[str, Any]:
    return COMMON | changes


GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 1024}
OPT = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 1024, "word_embed_proj_dim": 64,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", _small(), "llama"),
    "llama-odd": Family(
        "llama",
        _small(
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=10,
            hidden_size=72,
            attention_bias=True,
        ),
        "llama",
    ),
    "llama-linear": Family(
        "llama",
        _small(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
        "llama",
    ),
    "llama-ntk": Family(
        "llama", _small(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    ),
    "llama-yarn": Family("llama", _small(rope_parameters=YARN), "llama"),
    "llama-3.1": Family("llama", _small(rope_parameters=LLAMA3, tie_word_embeddings=True), "llama"),
    "mistral": Family("mistral", _small(sliding_window=24), "llama"),
    "smollm3": Family("smollm3", _small(num_hidden_layers=5), "smollm3"),
    "mixtral": Family("mixtral", _small(num_local_experts=6, num_experts_per_tok=2), "llama"),
    "qwen2": Family("qwen2", _small(), "qwen2"),
    "qwen2-windows": Family(
        "qwen2", _small(use_sliding_window=True, sliding_window=24, max_window_layers=2)
    ),
    "qwen2-mqa": Family(
        "qwen2", _small(num_attention_heads=3, num_key_value_heads=1, hidden_size=96), "qwen2"
    ),
    "qwen3": Family("qwen3", _small(head_dim=24, tie_word_embeddings=True), "qwen3"),
    "qwen3-moe": Family(
        "qwen3_moe",
        _small(
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=48,
            norm_topk_prob=True,
            head_dim=16,
        ),
        "qwen3moe",
    ),
    "qwen3-moe-mixed": Family(
        "qwen3_moe",
        _small(
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            norm_topk_prob=False,
            head_dim=16,
            mlp_only_layers=[1],
        ),  # fmt: skip
    ),
    "olmoe": Family("olmoe", _small(num_experts=8, num_experts_per_tok=3), "olmoe"),
    "phi3": Family("phi3", _small(partial_rotary_factor=0.75, sliding_window=30), "phi3"),
    "phi3-longrope": Family(
        "phi3", _small(original_max_position_embeddings=64, rope_parameters=LONGROPE), "phi3"
    ),
    "gemma2": Family(
        "gemma2",
        _small(head_dim=24, sliding_window=24, query_pre_attn_scalar=24, tie_word_embeddings=True),
        "gemma2",
    ),
    "gemma3": Family(
        "gemma3_text",
        _small(
            head_dim=24,
            sliding_window=24,
            query_pre_attn_scalar=24,
            num_hidden_layers=7,
            tie_word_embeddings=True,
        ),  # fmt: skip
        "gemma3",
    ),
    "gpt2": Family("gpt2", GPT2, "gpt2"),
    "olmo2": Family("olmo2", _small(), "olmo2"),
    "olmo3": Family("olmo3", _small(sliding_window=24, num_hidden_layers=5), "olmo2"),
    "olmo3-yarn": Family(
        "olmo3",
        _small(
            sliding_window=24,
            num_hidden_layers=5,
            rope_parameters={
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),  # fmt: skip
        "olmo2",
    ),
    "gemma3-pattern": Family(
        "gemma3_text",
        _small(
            head_dim=24,
            sliding_window=24,
            query_pre_attn_scalar=24,
            num_hidden_layers=5,
            tie_word_embeddings=True,
            sliding_window_pattern=3,
            hidden_activation="silu",
            final_logit_softcapping=5.0,
        ),
    ),  # fmt: skip
    "gemma": Family("gemma", _small(head_dim=24, tie_word_embeddings=True), "gemma"),
    "seed-oss": Family("seed_oss", _small(head_dim=16), "seed_oss"),
    "starcoder2": Family("starcoder2", _small(sliding_window=24), "starcoder2"),
    "phi": Family("phi", _small(partial_rotary_factor=0.5), "phi2"),
    "gpt-oss": Family(
        "gpt_oss",
        _small(
            head_dim=16,
            num_local_experts=6,
            num_experts_per_tok=2,
            sliding_window=24,
            rope_parameters=YARN | {"truncate": False},
        ),  # fmt: skip
        "gpt-oss",
    ),
    "opt": Family("opt", OPT),
    "opt-350m": Family("opt", OPT | {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
}


def save_family(family: Family, folder: Path) -> torch.nn.Module:
    model = family.build()
    model.save_pretrained(folder)
    return model


# -- GGUF -------------------------------------------------------------------------------------

Named = Iterator[tuple[str, np.ndarray]]


def _permuted(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k as llama.cpp's converter lays them: pairs side by side."""
    return w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def _converted(family: Family, config: Any, name: str, w: np.ndarray) -> np.ndarray:
    if family.arch in ("llama", "smollm3") and ".q_proj." in name:
        return _permuted(w, config.num_attention_heads)
    if family.arch in ("llama", "smollm3") and ".k_proj." in name:
        return _permuted(w, config.num_key_value_heads)
    if family.arch.startswith("gemma") and w.ndim == 1:
        return w + 1
    if family.arch == "gpt2" and w.ndim == 2 and ".c_" in name:
        return w.T
    return w


def _stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts' matrices as one tensor a layer and part, under the name of all of them."""
    out: dict[str, np.ndarray] = {}
    for name in sorted(tensors):
        if ".experts.0." in name:
            count = sum(name.replace(".experts.0.", f".experts.{e}.") in tensors for e in range(64))
            each = [tensors[name.replace(".experts.0.", f".experts.{e}.")] for e in range(count)]
            out[name.replace(".experts.0.", ".experts.")] = np.stack(each)
        elif not re.search(r"\.experts\.\d", name):
            out[name] = tensors[name]
    return out


def _unzipped(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """gpt-oss: gates and ups apart, experts' matrices as outputs by inputs."""
    out: dict[str, np.ndarray] = {}
    for name, t in tensors.items():
        base, bias = name.removesuffix("_bias"), ".bias" if name.endswith("_bias") else ".weight"
        if ".experts." not in name or t.ndim < 2 or base.endswith(".weight"):
            out[name] = t
            continue
        upright = t if bias == ".bias" else t.swapaxes(1, 2)
        if "gate_up_proj" in name:
            for part, first in (("gate_proj", 0), ("up_proj", 1)):
                out[base.replace("gate_up_proj", part) + bias] = upright[:, first::2]
        else:
            out[base + bias] = upright
    return out


def _hyperparameters(w: gguf.GGUFWriter, family: Family, config: Any) -> None:
    heads, hidden = config.num_attention_heads, config.hidden_size
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(hidden)
    w.add_block_count(config.num_hidden_layers)
    w.add_feed_forward_length(getattr(config, "intermediate_size", None) or 4 * hidden)
    w.add_head_count(heads)
    w.add_head_count_kv(getattr(config, "num_key_value_heads", heads))
    if getattr(config, "head_dim", None):
        w.add_key_length(config.head_dim)
        w.add_value_length(config.head_dim)
    if (eps := getattr(config, "rms_norm_eps", None)) is not None:
        w.add_layer_norm_rms_eps(eps)
    else:
        w.add_layer_norm_eps(
            getattr(config, "layer_norm_epsilon", None)
            or getattr(config, "norm_epsilon", None)
            or config.layer_norm_eps
        )
    if getattr(config, "sliding_window", None):
        w.add_sliding_window(config.sliding_window)
    if family.model_type == "olmo3":
        w.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if family.model_type == "gemma2":
        w.add_attn_logit_softcapping(config.attn_logit_softcapping)
        w.add_final_logit_softcapping(config.final_logit_softcapping)
    if count := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        w.add_expert_count(count)
        w.add_expert_used_count(config.num_experts_per_tok)
    if family.arch == "qwen3moe":
        w.add_expert_feed_forward_length(config.moe_intermediate_size)


def _rope(w: gguf.GGUFWriter, config: Any) -> Named:
    """Writes the keys of the rotation, and gives the tensors that go with it."""
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return
    rope = rope.get("full_attention", rope)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = int(width * (rope.get("partial_rotary_factor") or 1.0))
    w.add_rope_freq_base(rope["rope_theta"])
    w.add_rope_dimension_count(width)
    kind, original = rope["rope_type"], rope.get("original_max_position_embeddings")
    if kind == "linear":
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(rope["factor"])
        w.add_rope_scaling_orig_ctx_len(original)
    elif kind == "longrope":
        w.add_rope_scaling_orig_ctx_len(original)
        ratio = config.max_position_embeddings / original
        w.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(ratio) / np.log(original))))
        for which in ("long", "short"):
            yield f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32)
    elif kind == "llama3":
        plain = 1.0 / rope["rope_theta"] ** (np.arange(0, width, 2) / width)
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        yield "rope_freqs.weight", (plain / scaled.double().numpy()).astype(np.float32)


def save_gguf(family: Family, folder: Path, path: Path, quant: Q = Q.F32) -> None:
    """The model saved in `folder` as a GGUF file."""
    from safetensors.numpy import load_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    tensors = _stacked(_unzipped(load_file(folder / "model.safetensors")))
    w = gguf.GGUFWriter(path, family.arch)
    _hyperparameters(w, family, config)
    extra = list(_rope(w, config))
    add_vocabulary(w, VOCABULARY)
    arch = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == family.arch)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and getattr(config, "tie_word_embeddings", False):
            continue
        if name.endswith(".sinks"):
            name += ".weight"
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        values = np.ascontiguousarray(_converted(family, config, name, tensor), dtype=np.float32)
        fits = values.ndim > 1 and values.shape[-1] % 32 == 0 and not target.endswith(".bias")
        kind = quant if fits and "gate_inp" not in target else Q.F32
        w.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, values in extra:
        w.add_tensor(name, values)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
