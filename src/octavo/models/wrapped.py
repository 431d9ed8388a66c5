"""Folders of several modalities: how to get at their language model and at their encoder."""

from __future__ import annotations

from importlib import import_module

from octavo.checkpoint import Checkpoint
from octavo.models.images import Vision
from octavo.models.metadata import Recorded
from octavo.models.mmproj_folder import encoder_of
from octavo.models.unread import refuse_unread
from octavo.vision.normalize import FILES

# By model_type: modules of this package with a `text_model`, and those with a `vision`. They are
# imported when a checkpoint needs them.
TEXT = {
    "gemma3": "gemma3",
    "llava": "text_config",
    "llava_next": "text_config",
    "idefics3": "text_config",
    "smolvlm": "text_config",
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_vl",
    "qwen3_vl": "qwen3_vl",
}
VISION = {
    "gemma3": "gemma3_vision",
    "llava": "llava",
    "llava_next": "llava_next",
    "idefics3": "idefics3",
    "smolvlm": "idefics3",
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_vl",
    "qwen3_vl": "qwen3_vl",
}


def language_model(checkpoint: Checkpoint) -> Checkpoint:
    """A folder as that of its language model: itself, if it has nothing else. Raises
    CheckpointError."""
    name = TEXT.get(checkpoint.architecture)
    if name is None:
        return checkpoint
    text: Checkpoint = import_module(f"octavo.models.{name}").text_model(checkpoint)
    return text


def build_vision(checkpoint: Checkpoint) -> Vision | None:
    """The encoder of a folder, or of a GGUF model with its mmproj file; None for models of text,
    and for folders that do not say how images are prepared, which are served as such. Raises
    CheckpointError or Unsupported."""
    checkpoint = encoder_of(checkpoint)
    family = None if checkpoint.format == "gguf" else VISION.get(checkpoint.architecture)
    if family is None or not any(name in checkpoint.files for name in FILES):
        return None
    module = import_module(f"octavo.models.{family}")
    if family == "qwen2_vl":
        checkpoint = module.nested(checkpoint)
    inner = ("text_config", "vision_config")
    metadata = Recorded({k: v for k, v in checkpoint.metadata.items() if k not in inner})
    vision: Vision = module.vision(checkpoint, metadata)
    metadata.get("tie_word_embeddings")  # which the language model reads
    refuse_unread(checkpoint, metadata)
    return vision
