"""Gemma 3's images: a SigLIP tower, means of squares of patches, a norm and one linear layer.

The tokens of an image see each other in every layer of the language model.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from octavo.checkpoint import Checkpoint, Computed, Stored
from octavo.errors import CheckpointError, Unsupported
from octavo.models.metadata import Recorded
from octavo.models.vision import VisionModel, find_module, token_id
from octavo.models.vit import vision_tower
from octavo.program import Builder, Program
from octavo.vision.normalize import Normalization, processor_settings

TOKENS = 256  # transformers' defaults
IMAGE_TOKEN = 262144


def _projector(checkpoint: Checkpoint, width: int, eps: float) -> Program:
    norm = find_module(checkpoint, "multi_modal_projector.mm_soft_emb_norm")
    matrix = norm.replace("mm_soft_emb_norm", "mm_input_projection_weight")
    stored = checkpoint.tensor(matrix)
    if not isinstance(stored, Stored | Computed) or len(stored.shape) != 2:
        raise CheckpointError(f"{checkpoint.path.name}: tensor {matrix!r} is no matrix of floats")
    tensors = dict(checkpoint.tensors) | {matrix: Computed.transposed(stored)}
    b = Builder(replace(checkpoint, tensors=tensors))
    x = b.rms_norm(b.select_rows(b.features(width)), norm + ".weight", eps, offset=1.0)
    return b.build(1, b.linear(x, matrix, stored.shape[1]), task="embed")


def vision(checkpoint: Checkpoint, m: Recorded) -> VisionModel:
    """The encoder of a Gemma 3 folder; m: its outer configuration. Raises CheckpointError or
    Unsupported."""
    name, tokens = checkpoint.path.name, m.get("mm_tokens_per_image", TOKENS)
    tower = vision_tower(checkpoint, "siglip_vision_model")
    side = isqrt(tokens) if isinstance(tokens, int) and tokens > 0 else 0
    if not side or side**2 != tokens or tower.config.side % side:
        raise CheckpointError(
            f"{name}: mm_tokens_per_image is {str(tokens)[:40]}, patches a side {tower.config.side}"
        )
    if tokens > TOKENS:  # which are computed in one step, beside others in half of one
        raise Unsupported(f"{name}: mm_tokens_per_image is {tokens}; {TOKENS} at most")
    return VisionModel(
        "gemma3", tower, _projector(checkpoint, tower.config.hidden, tower.config.eps),
        Normalization.of(processor_settings(checkpoint), name),
        token_id(m, name, "image_token_index", default=IMAGE_TOKEN),
        merge=tower.config.side // side, how="mean", mutual=True,
    )  # fmt: skip
