"""The tensors of mmproj files, by their names in a Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.checkpoint import Checkpoint, Computed, Tensor, TensorType
from octavo.checkpoint.base import FLOATS
from octavo.errors import CheckpointError, Unsupported
from octavo.models.mmproj_qwen import KINDS

PREFIX = "vision_tower.vision_model."
_BLOCK, _LAYER = "v.blk.{}.", "encoder.layers.{}."
TOWER = {
    "v.patch_embd": "embeddings.patch_embedding",
    "v.position_embd": "embeddings.position_embedding",
    "v.pre_ln": "pre_layrnorm", "v.post_ln": "post_layernorm",
    _BLOCK + "ln1": _LAYER + "layer_norm1", _BLOCK + "ln2": _LAYER + "layer_norm2",
    _BLOCK + "attn_q": _LAYER + "self_attn.q_proj", _BLOCK + "attn_k": _LAYER + "self_attn.k_proj",
    _BLOCK + "attn_v": _LAYER + "self_attn.v_proj",
    _BLOCK + "attn_out": _LAYER + "self_attn.out_proj",
    _BLOCK + "ffn_up": _LAYER + "mlp.fc1", _BLOCK + "ffn_down": _LAYER + "mlp.fc2",
}  # fmt: skip
CLASS = {"v.class_embd": "embeddings.class_embedding"}
# By clip.projector_type: what llama.cpp calls modules of the projector.
PROJECTORS: Mapping[str, Mapping[str, str]] = {
    "mlp": {"mm.0": "multi_modal_projector.linear_1", "mm.2": "multi_modal_projector.linear_2"},
    "idefics3": {"mm.model.fc": "connector.modality_projection.proj"},
    "gemma3": {
        "mm.input_projection": "multi_modal_projector.mm_input_projection",
        "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    },
}
NORM = "mm.soft_emb_norm.weight"  # which has one added
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def encoder_tensors(mmproj: Checkpoint, kind: str, vision: dict[str, Any]) -> dict[str, Tensor]:
    """By their names in a folder. Raises Unsupported for one that has none."""
    modules = {m: PREFIX + hf for m, hf in TOWER.items()} | dict(PROJECTORS[kind])
    down = mmproj.tensors.get("v.blk.0.ffn_down.weight")
    if down is not None and down.shape[-1] == vision["hidden_size"]:  # of early converters
        up, down_ = _BLOCK + "ffn_up", _BLOCK + "ffn_down"
        modules[up], modules[down_] = modules[down_], modules[up]
    matrix = mmproj.tensor("v.blk.0.attn_q.weight").type
    out: dict[str, Tensor] = {}
    for name, tensor in mmproj.tensors.items():
        if name in CLASS:
            out[PREFIX + CLASS[name]] = tensor
            continue
        stem, _, part = name.rpartition(".")
        module = modules.get(_NUMBER.sub("{}", stem))
        if module is None or part not in ("weight", "bias"):
            raise Unsupported(
                f"{mmproj.path.name}: tensor {name[:64]!r}, which Octavo does not know"
            )
        numbers = _NUMBER.findall(name) if "{}" in module else []
        joined = "_" if module.endswith("input_projection") else "."
        full = f"{module.format(*numbers)}{joined}{part}"
        if name == NORM:
            tensor = _without_one(tensor)
        elif name == "v.patch_embd.weight" and (tensor.type, matrix) == _WIDENED:
            tensor = _narrow(tensor)
        out[full] = tensor
    return out


# llama.cpp's convolutions take no BF16, so that its converters widen the one of a BF16 file.
_WIDENED = (TensorType.F32, TensorType.BF16)


def _narrow(tensor: Tensor) -> Tensor:
    """An F32 tensor as BF16, rounded to the nearest, ties to even."""

    def read() -> Any:
        bits = tensor.vector().view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    return Computed(tensor.name, TensorType.BF16, tensor.shape, tensor.nbytes // 2, read)


def _without_one(tensor: Tensor) -> Tensor:
    """A norm's weights as Gemma's folders have them."""
    if tensor.type not in FLOATS:
        raise CheckpointError(
            f"tensor {tensor.name!r} is {tensor.type.name}, expected a float type"
        )
    one = np.float32(1)
    return Computed(
        tensor.name, TensorType.F32, tensor.shape, 4 * tensor.shape[0],
        lambda: tensor.vector() - one,
    )  # fmt: skip


def projector_of(m: Checkpoint) -> str:
    """The projector's type. Raises Unsupported."""
    kind = m.metadata.get("clip.projector_type", "")
    known = isinstance(kind, str) and (kind in PROJECTORS or kind in KINDS)
    if not known or not m.metadata.get("clip.has_vision_encoder", True):
        raise Unsupported(
            f"{m.path.name}: clip.projector_type is {str(kind)[:40]!r}",
            f"supported: {', '.join([*PROJECTORS, *KINDS])}",
        )
    return str(kind)
