"""Every field of transformers' configuration classes, with values that are not its default.

A small random model is made for each: what a field changes shows in logits or states.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

LENGTH = 48  # tokens of a comparison: past the windows and the contexts that rotations began with
VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
ENCODER = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
ENCODER["max_position_embeddings"] = 80
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mistral": SIZES | {"sliding_window": 24},
    "smollm3": SIZES,
    "mixtral": SIZES | EXPERTS | {"head_dim": 8},
    "qwen2": SIZES,
    "qwen3": SIZES | {"head_dim": 8},
    "qwen3_moe": SIZES | EXPERTS | {"moe_intermediate_size": 24},
    "olmoe": SIZES | EXPERTS,
    "olmo2": SIZES,
    "olmo3": SIZES | {"sliding_window": 24},
    "phi": SIZES,
    "phi3": SIZES | {"original_max_position_embeddings": 32},
    "gemma": SIZES | {"head_dim": 8},
    "gemma2": SIZES | {"head_dim": 8, "sliding_window": 24, "query_pre_attn_scalar": 8},
    "gemma3_text": SIZES | {"head_dim": 8, "sliding_window": 24, "query_pre_attn_scalar": 8},
    "gpt_oss": SIZES | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                        "sliding_window": 24},
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64},
    "opt": {
        "vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 32,
    },
    "seed_oss": SIZES | {"head_dim": 8},
    "starcoder2": SIZES,
    "bert": ENCODER,
    "roberta": ENCODER | {"pad_token_id": 1},
    "xlm-roberta": ENCODER | {"pad_token_id": 1},
}  # fmt: skip
ENCODERS = ("bert", "roberta", "xlm-roberta")

_PAIRS = 4  # of a head of 8 features
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0,
        "original_max_position_embeddings": 16, "attention_factor": 1.5, "truncate": False,
    },
    {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5,
        "original_max_position_embeddings": 16,
    },
    {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
    },
    {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
        "short_factor": [1.0 + 0.1 * i for i in range(_PAIRS)],
        "long_factor": [1.5 + 0.3 * i for i in range(_PAIRS)],
    },
)  # fmt: skip
STRINGS: dict[str, tuple[str, ...]] = {
    "hidden_act": ("relu", "gelu", "gelu_pytorch_tanh", "silu", "gelu_new", "tanh", "quick_gelu", "mish"),
    "summary_type": ("last", "mean"), "summary_activation": ("tanh",),
    "problem_type": ("regression",), "position_embedding_type": ("relative_key",),
    "dtype": ("float32",), "torch_dtype": ("float32",), "_name_or_path": ("x/y",),
    "tokenizer_class": ("LlamaTokenizer",), "prefix": ("x",), "finetuning_task": ("x",),
    "sep_token": ("x",),
}  # fmt: skip
STRINGS["hidden_activation"] = STRINGS["activation_function"] = STRINGS["hidden_act"]
# Fields that are null by default, or that take a number's type only by luck.
OTHERS: dict[str, tuple[Any, ...]] = {
    "sliding_window": (8, None), "head_dim": (16,), "n_inner": (40,), "clip_qkv": (0.4,),
    "num_key_value_heads": (1, 4), "num_attention_heads": (2,), "n_head": (2,),
    "hidden_size": (64,), "n_embd": (64,), "word_embed_proj_dim": (16,),
    "num_hidden_layers": (3,), "n_layer": (3,), "vocab_size": (80,),
    "max_position_embeddings": (128,), "n_positions": (128,), "type_vocab_size": (3,),
    "num_experts_per_tok": (1,), "num_local_experts": (3,), "num_experts": (3,),
    "intermediate_size": (40,), "ffn_dim": (40,), "moe_intermediate_size": (40,),
    "attn_logit_softcapping": (2.0, None), "final_logit_softcapping": (2.0, None),
    "use_bidirectional_attention": (True,), "classifier_dropout": (0.3,),
    "query_pre_attn_scalar": (3,), "swiglu_alpha": (1.0,), "swiglu_limit": (0.5,),
    "original_max_position_embeddings": (16,), "max_window_layers": (1,),
    "decoder_sparse_step": (2,), "mlp_only_layers": ([1],), "pad_token_id": (3, None),
    "no_rope_layers": ([0, 1, 1, 0],), "no_rope_layer_interval": (2,),
    "layer_types": (
        ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        ["full_attention"] * 4,
    ),
    "id2label": ({0: "a", 1: "b", 2: "c"},), "label2id": ({"a": 0},), "num_labels": (3,),
    "pretraining_tp": (2,), "chunk_size_feed_forward": (16,), "rope_parameters": ROPES,
    "eos_token_id": (5, [5, 6]), "bos_token_id": (5,), "architectures": (["OtherForCausalLM"],),
}  # fmt: skip
# Fields that only do something beside another one.
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("qwen2", "sliding_window"): {"use_sliding_window": True, "max_window_layers": 1},
    ("qwen3", "sliding_window"): {"use_sliding_window": True, "max_window_layers": 1},
    ("qwen3_moe", "sliding_window"): {"use_sliding_window": True},
    ("smollm3", "sliding_window"): {"use_sliding_window": True},
    ("qwen2", "use_sliding_window"): {"sliding_window": 8, "max_window_layers": 1},
    ("qwen3", "use_sliding_window"): {"sliding_window": 8, "max_window_layers": 1},
    ("qwen3_moe", "use_sliding_window"): {"sliding_window": 8},
    ("smollm3", "use_sliding_window"): {"sliding_window": 8},
    ("qwen2", "max_window_layers"): {"sliding_window": 8, "use_sliding_window": True},
    ("qwen3", "max_window_layers"): {"sliding_window": 8, "use_sliding_window": True},
    ("qwen2", "layer_types"): {"sliding_window": 8, "use_sliding_window": True},
    ("qwen3", "layer_types"): {"sliding_window": 8, "use_sliding_window": True},
    ("smollm3", "layer_types"): {"sliding_window": 8, "use_sliding_window": True},
    ("opt", "do_layer_norm_before"): {"_remove_final_layer_norm": True},
}  # fmt: skip


def fields(model_type: str) -> dict[str, Any]:
    """Every field of a configuration class, with its default; those of the base class, too."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]
    own = {f.name: f.default for f in dataclasses.fields(config)}
    return {k: v for k, v in own.items() if k not in ("model_type", "transformers_version")}


def values(model_type: str, name: str) -> tuple[Any, ...]:
    """What a field can be besides what it is in this file's small model."""
    now = MODELS[model_type].get(name, fields(model_type)[name])
    if name in OTHERS:
        return tuple(v for v in OTHERS[name] if v != now)
    if name in STRINGS:
        return tuple(v for v in STRINGS[name] if v != now)
    if isinstance(now, bool):
        return (not now,)
    if isinstance(now, int):
        return (now + 1,)
    if isinstance(now, float):
        return (now * 2 + 0.25,)
    raise KeyError(f"{model_type}: no values for {name}, which is {now!r}")


def flips(model_type: str) -> Iterator[tuple[str, str, Any]]:
    """model_type, field, value."""
    for name in fields(model_type):
        for value in values(model_type, name):
            yield model_type, name, value


def _kind(model_type: str) -> Any:
    from transformers import AutoModel, AutoModelForCausalLM

    return AutoModel if model_type in ENCODERS else AutoModelForCausalLM


def loaded(folder: Path) -> torch.nn.Module:
    """A saved model as transformers reads it."""
    from transformers import AutoConfig

    kind = _kind(AutoConfig.from_pretrained(folder).model_type)
    return kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def build(model_type: str, changes: dict[str, Any]) -> torch.nn.Module:
    """A model with random weights that keep the scale of what passes through; biases and norms, too."""
    from transformers import AutoConfig

    torch.manual_seed(7)
    settings = copy.deepcopy(MODELS[model_type] | changes)
    config = AutoConfig.for_model(model_type, **settings)
    model = _kind(model_type).from_config(config, attn_implementation="eager").eval()
    offset = 0.0 if model_type.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim == 1 else min(p.shape[-2:]) ** -0.5))
            if p.ndim == 1 and name.endswith("weight"):
                p.add_(offset)
    return model
