"""Names of a decoder's modules and sizes in GGUF files and Hugging Face folders.

Families override single names. Names of modules in layers have {} for the number of the layer;
where each expert is a module, its number is a second {}.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

GGUF_NAMES = {
    "embed": "token_embd", "positions": "position_embd", "norm": "output_norm", "head": "output",
    "attn_norm": "blk.{}.attn_norm", "ffn_norm": "blk.{}.ffn_norm",
    "attn_post": "blk.{}.post_attention_norm", "ffn_post": "blk.{}.post_ffw_norm",
    "qkv": "blk.{}.attn_qkv", "q": "blk.{}.attn_q", "k": "blk.{}.attn_k", "v": "blk.{}.attn_v",
    "q_norm": "blk.{}.attn_q_norm", "k_norm": "blk.{}.attn_k_norm", "o": "blk.{}.attn_output",
    "gate": "blk.{}.ffn_gate", "up": "blk.{}.ffn_up", "down": "blk.{}.ffn_down",
    "router": "blk.{}.ffn_gate_inp", "gates": "blk.{}.ffn_gate_exps",
    "ups": "blk.{}.ffn_up_exps", "downs": "blk.{}.ffn_down_exps",
}  # fmt: skip
_LAYER, _ATTN, _MLP = "model.layers.{}.", "model.layers.{}.self_attn.", "model.layers.{}.mlp."
HF_NAMES = {
    "embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "attn_norm": _LAYER + "input_layernorm", "ffn_norm": _LAYER + "post_attention_layernorm",
    "qkv": _ATTN + "qkv_proj", "q": _ATTN + "q_proj", "k": _ATTN + "k_proj",
    "v": _ATTN + "v_proj", "q_norm": _ATTN + "q_norm", "k_norm": _ATTN + "k_norm",
    "o": _ATTN + "o_proj", "gate": _MLP + "gate_proj", "up": _MLP + "up_proj",
    "down": _MLP + "down_proj", "router": _MLP + "gate",
    "gates": _MLP + "experts.{{}}.gate_proj", "ups": _MLP + "experts.{{}}.up_proj",
    "downs": _MLP + "experts.{{}}.down_proj",
}  # fmt: skip
GGUF_KEYS = {
    "layers": "block_count", "hidden": "embedding_length", "ffn": "feed_forward_length",
    "heads": "attention.head_count", "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "context": "context_length",
    "eps": "attention.layer_norm_rms_epsilon", "layer_norm_eps": "attention.layer_norm_epsilon",
    "window": "attention.sliding_window", "window_pattern": "attention.sliding_window_pattern",
    "experts": "expert_count", "experts_used": "expert_used_count",
    "expert_ffn": "expert_feed_forward_length",
}  # fmt: skip
HF_KEYS = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "ffn": "intermediate_size",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "context": "max_position_embeddings", "vocabulary": "vocab_size", "eps": "rms_norm_eps",
    "layer_norm_eps": "layer_norm_eps", "window": "sliding_window", "window_pattern": "layer_types",
    "experts": "num_experts", "experts_used": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
}  # fmt: skip
# Configuration keys that say whether a module has a bias: the first that is set decides.
_ALL = ("use_bias", "enable_bias")
_ATTENTION = ("attention_bias", *_ALL)
_FFN = ("mlp_bias", *_ALL)
BIASES = {
    "q": _ATTENTION, "k": _ATTENTION, "v": _ATTENTION, "o": ("attention_out_bias", *_ATTENTION),
    "gate": _FFN, "up": _FFN, "down": _FFN,
}  # fmt: skip
# Prefixes of module names in place of "model.": none if the base class was saved; then those of
# multimodal models as transformers 4 and 5 save them, and of their base class.
_INNER = (
    "", "language_model.model.", "model.language_model.", "language_model.", "model.text_model.",
)  # fmt: skip
_BARE = ("", "language_model.")


@dataclass(frozen=True)
class Names:
    """Full names of modules. bare: a base class was saved, which has no head."""

    modules: Mapping[str, str]
    bare: bool = False


def hf_names(names: Mapping[str, str], tensors: Collection[str]) -> Names:
    """`names`, which are those of a model with a head, with the prefix that these tensors have."""
    outer = names["embed"].split(".")[0] + "."
    embed = names["embed"].removeprefix(outer) + ".weight"
    prefix = next((p for p in (outer, *_INNER) if p + embed in tensors), outer)
    apart = "language_model." if prefix == "language_model.model." else ""  # of the head
    modules = {
        module: prefix + name.removeprefix(outer) if name.startswith(outer) else apart + name
        for module, name in names.items()
    }
    return Names(modules, prefix in _BARE)
