"""Refuses models whose configuration has keys that their family does not read.

An unread key is an error unless it is off (null, false, 0, empty) or known not to change what the
model computes. So an unknown option is refused instead of ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from octavo.checkpoint import Checkpoint
from octavo.errors import Unsupported
from octavo.models.metadata import Recorded

# Keys without effect on logits and states, in every family.
_HARMLESS = frozenset(
    # whose it is, who wrote it, and how it is stored (which checkpoint/ reads)
    "model_type architectures _name_or_path _model_name_or_path name_or_path auto_map "
    "torch_dtype dtype "
    "quantization_config quantization compression_config unsloth_fixed is_llama_config "
    "transformers.js_config sentence_transformers sbert_ce_default_activation_function "
    "_attn_implementation _commit_hash "
    "_attn_implementation_autoset attn_implementation _experts_implementation "
    "_flash_attn_2_enabled use_flash_attn use_flash_attention_2 "
    # what calls return, and how they are split
    "return_dict output_attentions output_hidden_states output_router_logits output_past use_cache "
    "cache_implementation chunk_size_feed_forward torchscript use_bfloat16 tf_legacy_loss "
    "pretraining_tp gradient_checkpointing reorder_and_upcast_attn "
    # heads that are not served, and labels
    "id2label label2id num_labels problem_type finetuning_task task_specific_params "
    # the tokenizer and what generates with it
    "tokenizer_class prefix suppress_tokens begin_suppress_tokens forced_decoder_ids bad_words_ids "
    "max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences "
    "remove_invalid_values exponential_decay_length_penalty "
    # training
    "init_std label_smoothing layerdrop".split()
)
_HARMLESS_LIKE = re.compile(
    r".*_version|(\w+_)?(dropout|pdrop)(_prob|_rate)?|\w+_dropout_\w+|\w+_token_(id|index)"
    r"|initializer_\w+|router_(aux_loss_coef|z_loss_coef)"
)
# The same for single families: keys of other models with the same configuration class, of earlier
# versions of it, or of what tensors tell.
_OWN: Mapping[str, str] = {
    "smollm3": "max_window_layers",
    "qwen3_moe": "max_window_layers",
    "gemma2": "hidden_act",
    "gemma3_text": "hidden_act _sliding_window_pattern mm_tokens_per_image vision_config",
    "llava": "image_seq_length ignore_index",
    "llava_next": "image_seq_length ignore_index use_image_newline_parameter",
    "idefics3": "use_reentrant_checkpoints vocab_size",
    "smolvlm": "use_reentrant_checkpoints vocab_size",
    "clip_vision_model": "projection_dim vocab_size initializer_factor",
    "siglip_vision_model": "vision_use_head projection_dim vocab_size",
    "qwen2_vl_vision": "in_chans spatial_patch_size",
    "qwen2_5_vl_vision": "in_chans spatial_patch_size tokens_per_second",
    "idefics3_vision": "max_image_size size use_base_siglip tie_word_embeddings",
    "gpt_oss": "hidden_act initial_context_length experts_per_token",
    "gpt2": "n_ctx summary_type summary_use_proj summary_activation summary_proj_to_labels",
    "bert": "tie_word_embeddings directionality pooler_type pooler_fc_size pooler_num_fc_layers "
    "pooler_num_attention_heads pooler_size_per_head",
    "roberta": "tie_word_embeddings",
    "xlm-roberta": "tie_word_embeddings",
}
# Keys with one supported value.
_SAME: Mapping[str, Any] = {
    "partial_rotary_factor": 1.0, "router_jitter_noise": 0.0, "interpolate_factor": 1,
    "full_attn_mod": 1, "mlp_type": "default", "norm_type": "layer_norm", "is_causal": True,
    "hidden_activation": "gelu_pytorch_tanh", "expert_weights_scale": 1.0, "logit_scale": 1.0,
    "residual_scale": 1.0,
}  # fmt: skip
_GGUF_HARMLESS = frozenset(
    "vocab_size pooling_type tensor_data_layout rope.scaling.finetuned".split()
)
_GGUF_MODALITIES = ("vision.", "mm.", "audio.")  # prefixes of keys of other modalities


def _harmless(checkpoint: Checkpoint, key: str) -> bool:
    if checkpoint.format == "gguf":
        name = key.removeprefix(checkpoint.architecture + ".")
        return name == key or name in _GGUF_HARMLESS or name.startswith(_GGUF_MODALITIES)
    own = _OWN.get(checkpoint.architecture, "").split()
    return key in _HARMLESS or key in own or bool(_HARMLESS_LIKE.fullmatch(key))


def refuse_unread(checkpoint: Checkpoint, metadata: Recorded) -> None:
    """Raises Unsupported for the first key that was not read and may change results."""
    for key, value in metadata.unread():
        name = key.removeprefix(f"{checkpoint.architecture}.")
        if name in _SAME and value is not None:
            same = value == _SAME[name]
        else:
            same = not value or _harmless(checkpoint, key)
        if not same:
            file = checkpoint.path.name if checkpoint.format == "gguf" else "config.json"
            raise Unsupported(
                f"{checkpoint.path.name}: {key[:80]!r} is {repr(value)[:60]}, which Octavo does "
                f"not know in {checkpoint.architecture!r} models",
                f"if it changes nothing that the model computes, take {key[:80]!r} out of {file}",
            )
