"""The image encoder of a Hugging Face folder as llama.cpp's mmproj file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from octavo.checkpoint.base import Checkpoint
from octavo.compress.counterparts import Counterpart
from octavo.errors import Unsupported
from octavo.models import build_vision
from octavo.models.metadata import Recorded
from octavo.models.mmproj_folder import SETTINGS
from octavo.models.mmproj_tensors import CLASS, NORM, PROJECTORS, TOWER
from octavo.models.vision import VisionModel, find_module
from octavo.models.vit import PATCH
from octavo.vision.normalize import processor_settings

_KINDS = {"llava": "mlp", "idefics3": "idefics3", "gemma3": "gemma3"}
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_UNUSED = ("head.", "embeddings.position_ids")  # of towers, in a folder


def build_convertible(checkpoint: Checkpoint) -> VisionModel | None:
    """The image encoder of a folder, None without one. Raises Unsupported for a family of which
    there are no mmproj files here."""
    vision = build_vision(checkpoint)
    if vision is None or (isinstance(vision, VisionModel) and vision.family in _KINDS):
        return vision
    raise Unsupported(
        f"{checkpoint.path.name}: {vision.family!r} encoders have no mmproj form here",
        f"built: {', '.join(_KINDS)}",
    )


def mmproj_parts(
    checkpoint: Checkpoint, vision: VisionModel
) -> tuple[dict[str, Any], tuple[Counterpart, ...]]:
    """Metadata and tensors. Raises Unsupported for an encoder that such a file cannot say."""
    kind = _KINDS[vision.family]
    parts = (*_tower(checkpoint, kind), *_projector(checkpoint, kind))
    return _metadata(checkpoint, vision, kind), parts


def text_only(checkpoint: Checkpoint) -> Checkpoint:
    """A folder without its image encoder."""
    projectors = [f"{hf}{end}" for p in PROJECTORS.values() for hf in p.values() for end in "._"]
    prefix = _prefix(checkpoint)
    tensors = {
        name: tensor for name, tensor in checkpoint.tensors.items()
        if not name.startswith(prefix) and not any(p in name for p in projectors)
    }  # fmt: skip
    return replace(checkpoint, tensors=tensors)


def _prefix(checkpoint: Checkpoint) -> str:
    """What names of the tower begin with."""
    (prefix,) = (n.removesuffix(PATCH) for n in checkpoint.tensors if n.endswith(PATCH))
    return prefix


def _refuse(checkpoint: Checkpoint, what: str) -> Unsupported:
    return Unsupported(f"{checkpoint.path.name}: an mmproj file cannot say {what}")


def _metadata(checkpoint: Checkpoint, vision: VisionModel, kind: str) -> dict[str, Any]:
    c, settings = vision.tower.config, processor_settings(checkpoint)
    n = vision.normalization
    if not math.isclose(n.scale, 1 / 255):
        raise _refuse(checkpoint, f"a rescale_factor of {n.scale}")
    sizes = {
        "image_size": c.size, "patch_size": c.patch, "embedding_length": c.hidden,
        "feed_forward_length": c.ffn, "block_count": c.layers,
        "attention.head_count": c.heads, "attention.layer_norm_epsilon": c.eps,
        "projection_dim": vision.projector.output.width, "image_mean": n.mean, "image_std": n.std,
        **_family(checkpoint, vision, kind),
    }  # fmt: skip
    return {
        "general.architecture": "clip", "general.type": "mmproj",
        "general.name": checkpoint.path.resolve().name, "general.quantization_version": 2,
        "clip.has_vision_encoder": True, "clip.projector_type": kind,
        **{f"clip.vision.{key}": value for key, value in sizes.items()},
        **_activation(checkpoint, vision), SETTINGS: json.dumps(dict(settings)),
    }  # fmt: skip


def _family(checkpoint: Checkpoint, vision: VisionModel, kind: str) -> dict[str, Any]:
    """Keys of one kind of projector."""
    if kind == "gemma3":
        return {"projector.scale_factor": vision.merge}
    if kind == "idefics3":
        settings = processor_settings(checkpoint)
        longest = settings.get("size", {}).get("longest_edge")
        splits = longest is not None and settings.get("do_image_splitting", True)
        return {"projector.scale_factor": vision.merge} | (
            {"preproc_image_size": longest} if splits else {}
        )
    m, layers = Recorded(checkpoint.metadata), vision.tower.config.layers
    if vision.keep_class and vision.tower.leading:
        raise _refuse(checkpoint, "that the class token is kept")
    if m.get("projector_hidden_act", "gelu") != "gelu":
        raise _refuse(checkpoint, f"a projector_hidden_act of {m['projector_hidden_act']}")
    layer: int = m.get("vision_feature_layer", -2)
    layer += layers + 1 if layer < 0 else 0
    return {} if layer == layers - 1 else {"feature_layer": [layer]}


def _activation(checkpoint: Checkpoint, vision: VisionModel) -> dict[str, bool]:
    kind = vision.tower.config.activation
    gelu = "gelu" if vision.tower.leading else "gelu_tanh"
    if kind not in ("quick_gelu", "silu", gelu):
        raise _refuse(checkpoint, f"a hidden_act of {kind}")
    return {"clip.use_gelu": kind == gelu, "clip.use_silu": kind == "silu"}


def _tower(checkpoint: Checkpoint, kind: str) -> Iterator[Counterpart]:
    prefix = _prefix(checkpoint)
    modules = {hf: ours for ours, hf in TOWER.items()}
    classes = {hf: ours for ours, hf in CLASS.items()}
    for name, tensor in checkpoint.tensors.items():
        own = name.removeprefix(prefix)
        if not name.startswith(prefix) or own.startswith(_UNUSED):
            continue
        if own in classes:
            yield Counterpart(classes[own], (tensor,))
            continue
        stem, _, part = own.rpartition(".")
        module = modules.get(_LAYER.sub("{}", stem))
        if module is None:
            raise _refuse(checkpoint, f"the tensor {name[:64]!r}")
        if kind == "mlp" and module == "v.post_ln":
            continue  # behind the layer whose states are taken
        yield Counterpart(f"{module.format(*_LAYER.findall(stem))}.{part}", (tensor,))


def _projector(checkpoint: Checkpoint, kind: str) -> Iterator[Counterpart]:
    tensors = checkpoint.tensors
    for ours, hf in PROJECTORS[kind].items():
        if hf.endswith("input_projection"):  # a parameter, not a module
            (name,) = (n for n in tensors if n.endswith(f"{hf}_weight"))
            yield Counterpart(f"{ours}.weight", (tensors[name],))
            continue
        module = find_module(checkpoint, hf)
        added = 1.0 if f"{ours}.weight" == NORM else 0.0
        yield Counterpart(f"{ours}.weight", (tensors[f"{module}.weight"],), added=added)
        if f"{module}.bias" in tensors:
            yield Counterpart(f"{ours}.bias", (tensors[f"{module}.bias"],))
