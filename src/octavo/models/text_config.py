"""Folders that keep all about their language model in a `text_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError

# Of the code that trained them.
_UNUSED = frozenset(
    "neftune_noise_alpha perceiver_config pixel_shuffle_factor qk_layer_norms use_resampler".split()
)


def text_model(checkpoint: Checkpoint) -> Checkpoint:
    """A folder as that of its language model. Raises CheckpointError."""
    outer, inner = checkpoint.metadata, checkpoint.metadata.get("text_config")
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"{checkpoint.path.name}: no text_config")
    tied = bool(inner.get("tie_word_embeddings") or outer.get("tie_word_embeddings"))
    metadata = {k: v for k, v in inner.items() if k not in _UNUSED}
    metadata = {"model_type": "llama"} | metadata | {"tie_word_embeddings": tied}
    return replace(checkpoint, metadata=metadata)
