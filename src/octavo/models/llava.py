"""LLaVA 1.5: a CLIP or SigLIP tower, two linear layers, and any language model."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError, Unsupported
from octavo.models.activations import activation
from octavo.models.metadata import Recorded
from octavo.models.vision import VisionModel, find_module, token_id
from octavo.models.vit import vision_tower
from octavo.program import Builder, Program
from octavo.vision.normalize import Normalization, processor_settings

TOWERS = ("clip_vision_model", "siglip_vision_model")


def _projector(checkpoint: Checkpoint, m: Recorded, width: int) -> Program:
    b, first = Builder(checkpoint), find_module(checkpoint, "multi_modal_projector.linear_1")
    second = first.removesuffix("1") + "2"
    hidden = checkpoint.tensor(first + ".weight").shape[0]
    biased = bool(m.get("multimodal_projector_bias", True))
    kind = activation(checkpoint, "projector_hidden_act", m.get("projector_hidden_act", "gelu"))
    x = b.select_rows(b.features(width))
    x = b.linear(x, first + ".weight", hidden, first + ".bias" if biased else None)
    x = b.activate(x, kind)
    x = b.linear(x, second + ".weight", hidden, second + ".bias" if biased else None)
    return b.build(1, x, task="embed")


def vision(checkpoint: Checkpoint, m: Recorded) -> VisionModel:
    """The encoder of a LLaVA folder; m: its outer configuration. Raises CheckpointError or
    Unsupported."""
    name = checkpoint.path.name
    values = checkpoint.metadata.get("vision_config")
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{name}: no vision_config")
    kind = str(values.get("model_type", TOWERS[0]))
    layer, select = m.get("vision_feature_layer", -2), m.get("vision_feature_select_strategy")
    if kind not in TOWERS:
        raise Unsupported(f"{name}: a {kind[:40]!r} tower", f"supported: {', '.join(TOWERS)}")
    if not isinstance(layer, int) or isinstance(layer, bool):
        raise Unsupported(f"{name}: vision_feature_layer is {str(layer)[:40]}")
    tower = vision_tower(checkpoint, kind, layer)
    if select not in (None, "default", "full") or (select != "full" and not tower.leading):
        raise Unsupported(f"{name}: vision_feature_select_strategy is {str(select)[:40]}")
    return VisionModel(
        "llava", tower, _projector(checkpoint, m, tower.config.hidden),
        Normalization.of(processor_settings(checkpoint), name),
        token_id(m, name, "image_token_index", "image_token_id"), keep_class=select == "full",
    )  # fmt: skip
