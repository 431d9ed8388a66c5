"""The image encoder of a GGUF model, read as the folder that it was made from: the keys of
llama.cpp's converters, and what llama.cpp does where they say nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from octavo.checkpoint import Checkpoint
from octavo.checkpoint.files import MemoryFile
from octavo.errors import CheckpointError, Unsupported
from octavo.models.metadata import Metadata, Recorded
from octavo.models.mmproj_qwen import KINDS, qwen_config, qwen_settings, qwen_tensors
from octavo.models.mmproj_tensors import CLASS, encoder_tensors, projector_of

# How pictures are prepared, as the folder's preprocessor says it: written by `octavo convert`.
SETTINGS = "octavo.preprocessor_config"
_UNUSED = frozenset(
    "clip.has_text_encoder clip.has_llava_projector clip.vision.projection_dim "
    "clip.vision.mm_projector_type clip.vision.image_crop_resolution "
    "clip.vision.image_aspect_ratio clip.vision.preproc_image_size".split()
)
_UNKNOWN, _CONTROL = 2, 3  # types of tokens that no text is split into


def encoder_of(model: Checkpoint) -> Checkpoint:
    """Where a model's image encoder is described: a folder itself, or the mmproj file of a GGUF
    model as its folder would be. Raises CheckpointError or Unsupported."""
    if (mmproj := model.mmproj) is None:
        return model
    seen = Recorded(mmproj.metadata)
    m = Metadata(replace(mmproj, metadata=seen))
    kind = projector_of(mmproj)
    if kind in KINDS:
        config = qwen_config(mmproj, m, kind) | _qwen_tokens(model)
        settings = json.dumps(qwen_settings(mmproj, m, kind))
        tensors = qwen_tensors(mmproj, kind)
    else:
        vision = _vision_config(mmproj, m)
        config = {"vision_config": vision, **_OUTER[kind](model, mmproj, m, vision)}
        settings = mmproj.metadata.get(SETTINGS) or json.dumps(_settings(kind, mmproj, m))
        tensors = encoder_tensors(mmproj, kind, vision)
    _refuse_unread(mmproj, seen)
    file = MemoryFile("preprocessor_config.json", str(settings).encode)
    return replace(
        mmproj, format="hf", metadata=config, tensors=tensors, files={file.name: file}
    )  # fmt: skip


def _vision_config(mmproj: Checkpoint, m: Metadata) -> dict[str, Any]:
    clip = "v.class_embd" in mmproj.tensors
    gelu, silu = (bool(mmproj.metadata.get(f"clip.use_{a}", False)) for a in ("gelu", "silu"))
    activation = "quick_gelu" if not gelu else "gelu" if clip else "gelu_pytorch_tanh"
    return {
        "model_type": "clip_vision_model" if clip else "siglip_vision_model",
        "num_hidden_layers": m.size("vision.block_count"),
        "hidden_size": m.size("vision.embedding_length"),
        "intermediate_size": m.size("vision.feed_forward_length"),
        "num_attention_heads": m.size("vision.attention.head_count"),
        "image_size": m.size("vision.image_size"), "patch_size": m.size("vision.patch_size"),
        "layer_norm_eps": m.number("vision.attention.layer_norm_epsilon"),
        "hidden_act": "silu" if silu else activation,
    }  # fmt: skip


def _llava(
    model: Checkpoint, mmproj: Checkpoint, m: Metadata, vision: dict[str, Any]
) -> dict[str, Any]:
    """llama.cpp takes the states before the last layer unless the file names others."""
    layers: int = vision["num_hidden_layers"]
    named = m.get("vision.feature_layer")
    taken = [layers - 1] if named is None else named
    if not isinstance(taken, list) or len(taken) != 1 or not isinstance(taken[0], int):
        raise Unsupported(f"{mmproj.path.name}: clip.vision.feature_layer is {str(named)[:40]}")
    if "v.post_ln.weight" in mmproj.tensors:
        raise Unsupported(f"{mmproj.path.name}: a norm behind the layers of an mlp projector")
    vision["num_hidden_layers"] = max(layers, taken[0] + 1)
    return {
        "model_type": "llava", "vision_feature_layer": taken[0],
        "vision_feature_select_strategy": "default" if mmproj.tensors.keys() & CLASS else "full",
        "image_token_index": _token(model, "<image>"),
    }  # fmt: skip


def _idefics3(
    model: Checkpoint, mmproj: Checkpoint, m: Metadata, vision: dict[str, Any]
) -> dict[str, Any]:
    return {
        "model_type": "idefics3", "scale_factor": m.size("vision.projector.scale_factor"),
        "image_token_id": _token(model, "<image>"),
    }  # fmt: skip


def _gemma3(
    model: Checkpoint, mmproj: Checkpoint, m: Metadata, vision: dict[str, Any]
) -> dict[str, Any]:
    side = vision["image_size"] // vision["patch_size"]
    side //= m.size("vision.projector.scale_factor", 4)
    return {
        "model_type": "gemma3", "mm_tokens_per_image": side**2,
        "image_token_index": _token(model, "<image_soft_token>"),
        "boi_token_index": _token(model, "<start_of_image>"),
        "eoi_token_index": _token(model, "<end_of_image>"),
    }  # fmt: skip


def _qwen_tokens(model: Checkpoint) -> dict[str, Any]:
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {f"vision_{part}_token_id": f"vision_{part}" for part in ("start", "end")}
    return {key: _token(model, f"<|{name}|>") for key, name in names.items()}


_Outer = Callable[[Checkpoint, Checkpoint, Metadata, dict[str, Any]], dict[str, Any]]
_OUTER: dict[str, _Outer] = {"mlp": _llava, "idefics3": _idefics3, "gemma3": _gemma3}


def _token(model: Checkpoint, name: str) -> int:
    """The token with this name, else the unknown one, which texts of bytes never have. Raises
    CheckpointError for one that a text could be split into."""
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    kinds = model.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise CheckpointError(f"{model.path.name}: no vocabulary with the types of its tokens")
    token = tokens.index(name) if name in tokens else -1
    if token < 0 and model.metadata.get("tokenizer.ggml.model") == "llama":
        token = kinds.index(_UNKNOWN) if _UNKNOWN in kinds else -1
    if token < 0 or kinds[token] not in (_UNKNOWN, _CONTROL):
        raise CheckpointError(f"{model.path.name}: the vocabulary has no control token {name}")
    return token


def _settings(kind: str, mmproj: Checkpoint, m: Metadata) -> dict[str, Any]:
    """How llama.cpp prepares pictures for this projector; sizes as the reference processors do."""
    size = m.size("vision.image_size")
    mean, std = (m.get(f"vision.image_{k}") for k in ("mean", "std"))
    square: dict[str, Any] = {
        "image_mean": mean,
        "image_std": std,
        "size": {"height": size, "width": size},
    }
    if kind == "mlp":
        padded = {"do_pad": True, "image_processor_type": "LlavaImageProcessor"}
        return square | padded | {"do_center_crop": False}
    if kind == "gemma3":
        return square
    longest = m.get("vision.preproc_image_size")
    return square | {
        "size": {"longest_edge": longest or size}, "max_image_size": {"longest_edge": size},
        "do_image_splitting": longest is not None,
    }  # fmt: skip


def _refuse_unread(mmproj: Checkpoint, seen: Recorded) -> None:
    """Raises Unsupported for the first key of the encoder that may change results."""
    read = {"clip.projector_type", "clip.use_gelu", "clip.use_silu", "clip.has_vision_encoder"}
    for key, value in seen.unread():
        prepared = SETTINGS in mmproj.metadata and key.startswith("clip.vision.image_")
        if key.startswith("clip.") and value and key not in read | _UNUSED and not prepared:
            raise Unsupported(
                f"{mmproj.path.name}: {key[:80]!r} is {str(value)[:60]}, which is not known",
                "without images: --mmproj none",
            )
