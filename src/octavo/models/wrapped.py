"""Folders of several modalities: how to get at their language model and at their encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError
from octavo.models import gemma3, gemma3_vision, idefics3, llava, llava_next, qwen2_vl, qwen3_vl
from octavo.models.images import Vision
from octavo.models.metadata import Recorded
from octavo.models.mmproj_folder import encoder_of
from octavo.models.unread import refuse_unread
from octavo.vision.normalize import FILES

# Of the code that trained them.
_UNUSED = frozenset(
    "neftune_noise_alpha perceiver_config pixel_shuffle_factor qk_layer_norms use_resampler".split()
)


def _text_model(checkpoint: Checkpoint) -> Checkpoint:
    outer, inner = checkpoint.metadata, checkpoint.metadata.get("text_config")
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"{checkpoint.path.name}: no text_config")
    tied = bool(inner.get("tie_word_embeddings") or outer.get("tie_word_embeddings"))
    metadata = {k: v for k, v in inner.items() if k not in _UNUSED}
    metadata = {"model_type": "llama"} | metadata | {"tie_word_embeddings": tied}
    return replace(checkpoint, metadata=metadata)


# By model_type.
TEXT: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "gemma3": gemma3.text_model,
    "llava": _text_model,
    "llava_next": _text_model,
    "idefics3": _text_model,
    "smolvlm": _text_model,
    "qwen2_vl": qwen2_vl.text_model,
    "qwen2_5_vl": qwen2_vl.text_model,
    "qwen3_vl": qwen3_vl.text_model,
}
VISION: dict[str, Callable[[Checkpoint, Recorded], Vision]] = {
    "gemma3": gemma3_vision.vision,
    "llava": llava.vision,
    "llava_next": llava_next.vision,
    "idefics3": idefics3.vision,
    "smolvlm": idefics3.vision,
    "qwen2_vl": qwen2_vl.vision,
    "qwen2_5_vl": qwen2_vl.vision,
    "qwen3_vl": qwen3_vl.vision,
}


def build_vision(checkpoint: Checkpoint) -> Vision | None:
    """The encoder of a folder, or of a GGUF model with its mmproj file; None for models of text,
    and for folders that do not say how images are prepared, which are served as such. Raises
    CheckpointError or Unsupported."""
    checkpoint = encoder_of(checkpoint)
    family = None if checkpoint.format == "gguf" else VISION.get(checkpoint.architecture)
    if family is None or not any(name in checkpoint.files for name in FILES):
        return None
    if family is qwen2_vl.vision:
        checkpoint = qwen2_vl.nested(checkpoint)
    inner = ("text_config", "vision_config")
    metadata = Recorded({k: v for k, v in checkpoint.metadata.items() if k not in inner})
    vision = family(checkpoint, metadata)
    metadata.get("tie_word_embeddings")  # which the language model reads
    refuse_unread(checkpoint, metadata)
    return vision
