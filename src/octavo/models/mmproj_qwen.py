"""The image encoder of a Qwen-VL model in GGUF, read as the folder that it was made from: keys and
tensors as llama.cpp's converters write them, and what it does where they say nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.checkpoint import Checkpoint, Computed, Stored, Tensor
from octavo.errors import CheckpointError, Unsupported
from octavo.models.metadata import Metadata
from octavo.models.qwen_tower import EPS

PREFIX = "visual."
WINDOW = 112  # pixels a side of Qwen2.5-VL's windows
FRAMES = 2  # of a patch, each with a convolution of its own
PATCHES = "v.patch_embd.weight"
_BLOCK, _HF = "v.blk.{}.", "blocks.{}."
_COMMON = {
    "v.patch_embd": "patch_embed.proj",
    _BLOCK + "ln1": _HF + "norm1", _BLOCK + "ln2": _HF + "norm2",
    _BLOCK + "attn_qkv": _HF + "attn.qkv", _BLOCK + "attn_out": _HF + "attn.proj",
}  # fmt: skip
_MERGER = {"v.post_ln": "merger.ln_q", "mm.0": "merger.mlp.0", "mm.2": "merger.mlp.2"}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class QwenKind:
    """A projector type. modules: its own names. pixels: the fewest and the most of a picture."""

    model_type: str
    language: str
    modules: Mapping[str, str]
    activation: str
    pixels: tuple[int, int] = (56 * 56, 28 * 28 * 16384)


KINDS: Mapping[str, QwenKind] = {
    "qwen2vl_merger": QwenKind(
        "qwen2_vl", "qwen2vl",
        _MERGER | {_BLOCK + "ffn_up": _HF + "mlp.fc1", _BLOCK + "ffn_down": _HF + "mlp.fc2"},
        "quick_gelu",
    ),
    "qwen2.5vl_merger": QwenKind(
        "qwen2_5_vl", "qwen2vl",
        _MERGER | {f"{_BLOCK}ffn_{n}": f"{_HF}mlp.{n}_proj" for n in ("gate", "up", "down")},
        "silu",
    ),
    "qwen3vl_merger": QwenKind(
        "qwen3_vl", "qwen3vl",
        {
            "v.position_embd": "pos_embed", "v.post_ln": "merger.norm",
            "mm.0": "merger.linear_fc1", "mm.2": "merger.linear_fc2",
            _BLOCK + "ffn_up": _HF + "mlp.linear_fc1", _BLOCK + "ffn_down": _HF + "mlp.linear_fc2",
            "v.deepstack.{}.norm": "deepstack_merger_list.{}.norm",
            "v.deepstack.{}.fc1": "deepstack_merger_list.{}.linear_fc1",
            "v.deepstack.{}.fc2": "deepstack_merger_list.{}.linear_fc2",
        },
        "gelu_pytorch_tanh", (256 * 32**2, 16384 * 32**2),
    ),
}  # fmt: skip


def _deep(mmproj: Checkpoint) -> list[int]:
    """Layers whose states the language model adds."""
    found = (re.fullmatch(r"v\.deepstack\.(\d+)\.norm\.weight", n) for n in mmproj.tensors)
    return sorted(int(m[1]) for m in found if m)


def qwen_config(mmproj: Checkpoint, m: Metadata, kind: str) -> dict[str, Any]:
    """The folder's config.json but for its tokens. Raises CheckpointError or Unsupported."""
    name, k = mmproj.path.name, KINDS[kind]
    eps = m.number("vision.attention.layer_norm_epsilon", EPS)
    if abs(eps - EPS) > EPS / 1000:
        raise Unsupported(f"{name}: vision.attention.layer_norm_epsilon is {eps:.1e}, not {EPS}")
    hidden, layers = m.size("vision.embedding_length"), m.size("vision.block_count")
    for unused in ("vision.image_size", "vision.feed_forward_length", "vision.is_deepstack_layers"):
        m.get(unused)  # the tensors tell
    ffn, out = (mmproj.tensor(n).shape[0] for n in ("v.blk.0.ffn_up.weight", "mm.2.weight"))
    vision: dict[str, Any] = {
        "depth": layers, "num_heads": m.size("vision.attention.head_count"),
        "patch_size": m.size("vision.patch_size"), "temporal_patch_size": FRAMES,
        "spatial_merge_size": m.size("vision.spatial_merge_size", 2), "hidden_act": k.activation,
    }  # fmt: skip
    if kind == "qwen2vl_merger":
        if ffn % hidden:
            raise CheckpointError(f"{name}: feed-forward blocks of {ffn} features for {hidden}")
        vision |= {"embed_dim": hidden, "hidden_size": out, "mlp_ratio": ffn // hidden}
    else:
        vision |= {"hidden_size": hidden, "out_hidden_size": out, "intermediate_size": ffn}
    if kind == "qwen2.5vl_merger":
        every = m.size("vision.n_wa_pattern")
        full = [i for i in range(layers) if (i + 1) % every == 0]
        window = m.size("vision.window_size", WINDOW)
        vision |= {"window_size": window, "fullatt_block_indexes": full}
    if kind == "qwen3vl_merger":
        positions = mmproj.tensor("v.position_embd.weight").shape[0]
        vision |= {"num_position_embeddings": positions, "deepstack_visual_indexes": _deep(mmproj)}
    return {"model_type": k.model_type, "text_config": {}, "vision_config": vision}


def qwen_settings(mmproj: Checkpoint, m: Metadata, kind: str) -> dict[str, Any]:
    """How pictures are prepared: within the limits that models of this kind are published with,
    where the file names none."""
    fewest, most = KINDS[kind].pixels
    return {
        "image_mean": m.get("vision.image_mean"), "image_std": m.get("vision.image_std"),
        "patch_size": m.size("vision.patch_size"),
        "merge_size": m.size("vision.spatial_merge_size", 2), "temporal_patch_size": FRAMES,
        "min_pixels": m.size("vision.image_min_pixels", fewest),
        "max_pixels": m.size("vision.image_max_pixels", most),
    }  # fmt: skip


def qwen_tensors(mmproj: Checkpoint, kind: str) -> dict[str, Tensor]:
    """By their names in a folder: queries, keys and values in one, a patch's convolutions too.
    Raises CheckpointError, or Unsupported for a tensor that is not known."""
    modules, deep = _COMMON | dict(KINDS[kind].modules), _deep(mmproj)
    out: dict[str, Tensor] = {}
    for name, tensor in mmproj.tensors.items():
        if name == PATCHES + ".1" or re.search(r"\.attn_[kv]\.(weight|bias)$", name):
            continue  # joined to others below
        stem, _, part = name.rpartition(".")
        stem = re.sub(r"\.attn_q$", ".attn_qkv", stem)
        module = modules.get(_NUMBER.sub("{}", stem + ".").rstrip("."))
        module = modules.get(stem) if module is None else module
        if module is None or part not in ("weight", "bias"):
            raise Unsupported(
                f"{mmproj.path.name}: tensor {name[:64]!r}, which Octavo does not know"
            )
        number = int((_NUMBER.findall(name) or ["0"])[0])
        if stem.startswith("v.deepstack."):
            number = deep.index(number)
        if ".attn_q." in name:
            others = (name.replace(".attn_q.", f".attn_{n}.") for n in "kv")
            tensor = _joined(name, [tensor, *(mmproj.tensor(n) for n in others)], 0)
        elif name == PATCHES:
            second = mmproj.tensor(PATCHES + ".1", tensor.shape)
            tensor = _joined(name, [tensor, second], None)
        out[PREFIX + module.format(number) + "." + part] = tensor
    return out


def _joined(name: str, parts: list[Tensor], axis: int | None) -> Tensor:
    """Tensors of one type one after the other; axis None: beside each other, along a new axis
    behind the second. Raises CheckpointError."""
    kinds = {part.type for part in parts}
    if len(kinds) > 1 or (axis is None and len(parts[0].shape) != 4):
        raise CheckpointError(f"tensors {name[:64]!r} and those that belong to it do not fit")

    def read() -> Any:
        arrays = [p.array() if isinstance(p, Stored) else p.raw() for p in parts]
        if axis is None:
            return np.stack([a.reshape(parts[0].shape) for a in arrays], axis=2)
        return np.concatenate(arrays)

    first = parts[0].shape
    rows = sum(part.shape[0] for part in parts)
    shape = (*first[:2], len(parts), *first[2:]) if axis is None else (rows, *first[1:])
    return Computed(name, parts[0].type, shape, sum(part.nbytes for part in parts), read)
