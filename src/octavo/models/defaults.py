"""Defaults that transformers has for keys missing from config.json, by model_type.

Only keys that a family reads and whose default is not null. Sizes without which a model cannot be
read have none: they are required. `tests/parity/test_config_fields.py` compares these with
transformers' classes.
"""

from __future__ import annotations

from typing import Any

_SWIGLU: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 1e4,
}  # fmt: skip
_BIASES: dict[str, Any] = {"attention_bias": False, "mlp_bias": False}
_OLMO = _SWIGLU | {"rms_norm_eps": 1e-5, "attention_bias": False}
_GEMMA: dict[str, Any] = {
    "head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 1e4,
    "attention_bias": False,
}  # fmt: skip
_GEMMA2 = _GEMMA | {
    "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}  # fmt: skip
_ENCODER: dict[str, Any] = {
    "hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "is_decoder": False,
}  # fmt: skip
_VIT: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_channels": 3, "image_size": 224, "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
_QWEN2: dict[str, Any] = _SWIGLU | {
    "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip
_UNTIED = {k: v for k, v in _QWEN2.items() if k != "tie_word_embeddings"}  # it is elsewhere
_QWEN2_VL: dict[str, Any] = _UNTIED | {
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80,
}  # fmt: skip
_QWEN_VIT: dict[str, Any] = {
    "depth": 32, "num_heads": 16, "in_channels": 3, "hidden_size": 3584, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _SWIGLU | _BIASES,
    "mistral": _SWIGLU | {"num_key_value_heads": 8, "sliding_window": 4096},
    "smollm3": _SWIGLU
    | _BIASES
    | {
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_theta": 2e6,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
    },  # fmt: skip
    "mixtral": _SWIGLU
    | {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },  # fmt: skip
    "qwen2": _QWEN2,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3": _SWIGLU
    | {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },  # fmt: skip
    "qwen3_vl_text": {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "attention_bias": False,
        "rope_theta": 5e5,
    },
    "qwen3_moe": _SWIGLU
    | {
        "num_key_value_heads": 4,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
    },  # fmt: skip
    "olmoe": _OLMO | {"num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False},
    "olmo2": _OLMO,
    "olmo3": _OLMO | {"rope_theta": 5e5, "sliding_window": 4096},
    "phi": {
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },  # fmt: skip
    "phi3": _SWIGLU | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "gemma": _GEMMA | {"num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": _GEMMA2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": _GEMMA2
    | {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "use_bidirectional_attention": False,
        "sliding_window_pattern": 6,
    },  # fmt: skip
    "gpt_oss": _SWIGLU
    | {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1.5e5,
        "sliding_window": 128,
        "attention_bias": True,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },  # fmt: skip
    "gpt2": {
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },  # fmt: skip
    "opt": {
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "enable_bias": True,
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
    },  # fmt: skip
    "seed_oss": _SWIGLU
    | {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
    },  # fmt: skip
    "starcoder2": {
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "tie_word_embeddings": True,
        "rope_theta": 1e4,
    },  # fmt: skip
    "bert": _ENCODER | {"pad_token_id": 0},
    "clip_vision_model": _VIT | {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "siglip_vision_model": _VIT | {"patch_size": 16},
    "qwen2_vl_vision": _QWEN_VIT | {"embed_dim": 1280, "hidden_act": "quick_gelu", "mlp_ratio": 4},
    "qwen2_5_vl_vision": _QWEN_VIT
    | {
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "out_hidden_size": 3584,
        "window_size": 112,
        "fullatt_block_indexes": (7, 15, 23, 31),
    },  # fmt: skip
    "qwen3_vl_vision": _QWEN_VIT
    | {
        "depth": 27,
        "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4304,
        "patch_size": 16,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": (8, 16, 24),
    },  # fmt: skip
    "idefics3_vision": _VIT | {"hidden_size": 1152, "num_attention_heads": 16},
    "roberta": _ENCODER | {"pad_token_id": 1},
    "xlm-roberta": _ENCODER | {"pad_token_id": 1},
}
