"""GGUF models that take images: a second file, called mmproj, has the encoder, with the keys and
names of llama.cpp's converters. Both are read as the folder that they were made from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.checkpoint import Checkpoint, Computed, Tensor, TensorType, open_checkpoint
from octavo.checkpoint.base import FLOATS
from octavo.checkpoint.files import MemoryFile
from octavo.checkpoint.folders import mmproj_files
from octavo.errors import CheckpointError, OctavoError, Unsupported, UsageError
from octavo.models.metadata import Metadata, Recorded

AUTO, NONE = "auto", "none"
ARCHITECTURE = "clip"
# How pictures are prepared, as the folder's preprocessor says it: written by `octavo convert`.
SETTINGS = "octavo.preprocessor_config"
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
_LANGUAGE = {"idefics3": "llama", "gemma3": "gemma3"}  # the one architecture that it is made for
_UNUSED = frozenset(
    "clip.has_text_encoder clip.has_llava_projector clip.vision.projection_dim "
    "clip.vision.mm_projector_type clip.vision.image_crop_resolution "
    "clip.vision.image_aspect_ratio clip.vision.preproc_image_size".split()
)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_UNKNOWN, _CONTROL = 2, 3  # types of tokens that no text is split into


def with_mmproj(checkpoint: Checkpoint, mmproj: str = AUTO) -> Checkpoint:
    """A GGUF model together with its image encoder's file.

    mmproj: the file; "auto": one that lies beside the model and fits it, if there is one; "none".
    Raises UsageError for a folder that is given one, CheckpointError or Unsupported for a file that
    is no encoder of this model.
    """
    if mmproj == NONE or (mmproj == AUTO and checkpoint.format != "gguf"):
        return checkpoint
    if checkpoint.format != "gguf":
        raise UsageError(
            f"--mmproj is for .gguf models; {checkpoint.path.name} is a folder, which has its own "
            "image encoder"
        )
    if mmproj != AUTO:
        return _joined(checkpoint, Path(mmproj))
    path = checkpoint.path
    names = [p.name for p in path.parent.glob("*.gguf")]
    for name in mmproj_files(names, path.name):
        try:
            return _joined(checkpoint, path.with_name(name))
        except OctavoError:  # another model's
            continue
    return checkpoint


def _joined(model: Checkpoint, path: Path) -> Checkpoint:
    other = open_checkpoint(path)
    if other.format != "gguf" or other.architecture != ARCHITECTURE:
        raise CheckpointError(
            f"{path.name} is no mmproj file: its architecture is {other.architecture[:40]!r}, not "
            f"{ARCHITECTURE!r}",
            "name the model first, and the file of its image encoder with --mmproj",
        )
    joined = replace(
        model, mmproj=other, sources=(*model.sources, *other.sources),
        maps=(*model.maps, *other.maps), states={**model.states, **other.states},
    )  # fmt: skip
    width, wanted = _width(joined), Metadata(model).get("embedding_length")
    if width != wanted:
        raise CheckpointError(
            f"{path.name} makes embeddings of {width} features; {model.path.name} takes {wanted}",
            "take the mmproj file of the same model",
        )
    return joined


def _kind(m: Checkpoint) -> str:
    """The projector's type. Raises Unsupported."""
    kind = m.metadata.get("clip.projector_type", "")
    if kind not in PROJECTORS or not m.metadata.get("clip.has_vision_encoder", True):
        raise Unsupported(
            f"{m.path.name}: clip.projector_type is {str(kind)[:40]!r}",
            f"supported: {', '.join(PROJECTORS)}",
        )
    return str(kind)


def _width(model: Checkpoint) -> int:
    """Features of the embeddings."""
    m = model.mmproj
    assert m is not None
    kind, architecture = _kind(m), model.architecture
    if _LANGUAGE.get(kind, architecture) != architecture:
        raise CheckpointError(
            f"{m.path.name} is made for {_LANGUAGE[kind]} models; {model.path.name} is "
            f"{architecture[:40]}"
        )
    if kind == "gemma3":
        return m.tensor("mm.input_projection.weight").shape[-1]
    return m.tensor("mm.2.weight" if kind == "mlp" else "mm.model.fc.weight").shape[0]


def encoder_of(model: Checkpoint) -> Checkpoint:
    """Where a model's image encoder is described: a folder itself, or the mmproj file of a GGUF
    model as its folder would be. Raises CheckpointError or Unsupported."""
    if (mmproj := model.mmproj) is None:
        return model
    seen = Recorded(mmproj.metadata)
    m = Metadata(replace(mmproj, metadata=seen))
    kind = _kind(mmproj)
    vision = _vision_config(mmproj, m)
    config: dict[str, Any] = {"vision_config": vision, **_OUTER[kind](model, mmproj, m, vision)}
    settings = mmproj.metadata.get(SETTINGS) or json.dumps(_settings(kind, mmproj, m))
    _refuse_unread(mmproj, seen)
    tensors = _tensors(mmproj, kind, vision)
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
                f"{mmproj.path.name}: {key[:80]!r} is {str(value)[:60]}, which Octavo does not know"
            )


def _tensors(mmproj: Checkpoint, kind: str, vision: dict[str, Any]) -> dict[str, Tensor]:
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
