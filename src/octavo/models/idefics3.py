"""Idefics 3 and SmolVLM: a SigLIP tower, squares of patches side by side, one linear layer, and a
llama."""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError
from octavo.models.metadata import Recorded
from octavo.models.vision import VisionModel, find_module, token_id
from octavo.models.vit import vision_tower
from octavo.program import Builder, Program
from octavo.vision.normalize import Normalization, processor_settings

IMAGE_TOKEN = 128257  # transformers' default
SCALE = 2


def _projector(checkpoint: Checkpoint, width: int) -> Program:
    b, name = Builder(checkpoint), find_module(checkpoint, "connector.modality_projection.proj")
    hidden = checkpoint.tensor(name + ".weight").shape[0]
    x = b.linear(b.select_rows(b.features(width)), name + ".weight", hidden)
    return b.build(1, x, task="embed")


def vision(checkpoint: Checkpoint, m: Recorded) -> VisionModel:
    """The encoder of an Idefics 3 or SmolVLM folder; m: its outer configuration. Raises
    CheckpointError or Unsupported."""
    name, scale = checkpoint.path.name, m.get("scale_factor", SCALE)
    tower = vision_tower(checkpoint, "idefics3_vision", uneven=True)
    if not isinstance(scale, int) or scale < 1 or tower.config.side % scale:
        raise CheckpointError(
            f"{name}: scale_factor is {str(scale)[:40]}, patches a side {tower.config.side}"
        )
    token = token_id(m, name, "image_token_id", default=IMAGE_TOKEN)
    return VisionModel(
        "idefics3", tower, _projector(checkpoint, tower.config.hidden * scale**2),
        Normalization.of(processor_settings(checkpoint), name), token, merge=scale,
    )  # fmt: skip
