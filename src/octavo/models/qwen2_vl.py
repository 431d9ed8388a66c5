"""Qwen2-VL and Qwen2.5-VL: a tower for images in their own proportions, whose patches are rotated
along two axes; squares of them become tokens, which the language model rotates along three.

Qwen2.5-VL has the norms and the feed-forward blocks of its language model, and windows in most
layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError, Unsupported
from octavo.models import rope
from octavo.models.activations import activation
from octavo.models.grid import MOST_TOKENS, GridTower, GridVision
from octavo.models.metadata import Metadata, Recorded
from octavo.models.unread import refuse_unread
from octavo.models.vision import find_module, token_id
from octavo.program import Activation, Builder, Program, Value
from octavo.vision.normalize import Normalization, processor_settings
from octavo.vision.qwen2_vl import pixel_limits

CHANNELS = 3
EPS = 1e-6
SECTIONS = [16, 24, 24]  # transformers' defaults
THETA = 10000.0
IMAGE_TOKEN = 151655
PATCHES = "patch_embed.proj"


@dataclass(frozen=True)
class _Config:
    """Sizes of a tower. out: width of its tokens' embeddings. windows: tokens a side, and the
    layers without; Qwen2-VL has none."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    out: int
    patch: int
    merge: int
    frames: int
    activation: Activation
    theta: float
    window: int = 0
    full: frozenset[int] = frozenset()


def nested(checkpoint: Checkpoint) -> Checkpoint:
    """The folder with the language model's keys in text_config, which published ones have beside
    the others."""
    given = checkpoint.metadata
    if "text_config" in given:
        return checkpoint
    own = ("model_type", "architectures", "vision_config", "tie_word_embeddings")
    outer = {k: v for k, v in given.items() if k in own or k.endswith("_token_id")}
    text = {k: v for k, v in given.items() if k not in outer or k == "tie_word_embeddings"}
    return replace(checkpoint, metadata=outer | {"text_config": text})


def text_model(checkpoint: Checkpoint) -> Checkpoint:
    """The language model of a folder: Qwen 2 with a rotation along three axes."""
    outer, inner = checkpoint.metadata, nested(checkpoint).metadata["text_config"]
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"{checkpoint.path.name}: text_config is {str(inner)[:40]}")
    key = "rope_scaling" if inner.get("rope_scaling") else "rope_parameters"
    parameters = inner.get(key) or {}
    if not isinstance(parameters, Mapping):
        raise CheckpointError(f"{checkpoint.path.name}: {key} is {str(parameters)[:40]}")
    tied = bool(inner.get("tie_word_embeddings") or outer.get("tie_word_embeddings"))
    metadata = dict(inner) | {
        key: {"mrope_section": SECTIONS} | dict(parameters),
        "model_type": f"{outer['model_type']}_text", "tie_word_embeddings": tied,
    }  # fmt: skip
    return replace(checkpoint, metadata=metadata)


def _config(checkpoint: Checkpoint, newer: bool) -> _Config:
    m, name = Metadata(checkpoint), checkpoint.path.name
    rotation = m.get("rope_parameters") or {}
    theta = rotation.get("rope_theta", THETA) if isinstance(rotation, Mapping) else None
    if not isinstance(theta, int | float) or not 1 < theta < 1e30:
        raise m.bad("rope_parameters", rotation)
    if isinstance(rotation, Mapping) and rotation.get("rope_type", "axial") != "axial":
        raise Unsupported(f"{name}: a vision rope_type of {str(rotation['rope_type'])[:40]!r}")
    hidden = m.size("hidden_size" if newer else "embed_dim")
    c = _Config(
        layers=m.size("depth"), hidden=hidden, heads=m.size("num_heads"),
        ffn=m.size("intermediate_size") if newer else hidden * m.size("mlp_ratio"),
        out=m.size("out_hidden_size" if newer else "hidden_size"), patch=m.size("patch_size"),
        merge=m.size("spatial_merge_size"), frames=m.size("temporal_patch_size"),
        activation=activation(checkpoint, "hidden_act", m.get("hidden_act")), theta=float(theta),
    )  # fmt: skip
    if c.hidden % (4 * c.heads) or c.layers > len(checkpoint.tensors):
        raise CheckpointError(
            f"{name}: {c.layers} vision layers of {c.hidden} features over {c.heads} heads"
        )
    if m.size("in_channels") != CHANNELS:
        raise Unsupported(f"{name}: images of {m.size('in_channels')} channels")
    return replace(c, **_windows(m, c)) if newer else c


def _windows(m: Metadata, c: _Config) -> dict[str, Any]:
    window, full = m.size("window_size") // c.merge // c.patch, m.get("fullatt_block_indexes")
    if not window:
        raise m.bad("window_size", m.get("window_size"))
    if not isinstance(full, list | tuple) or not all(type(i) is int for i in full):
        raise m.bad("fullatt_block_indexes", full)
    return {"window": window, "full": frozenset(full)}


def _tower(b: Builder, c: _Config, prefix: str, newer: bool) -> Program:
    frequencies = rope.plain(c.theta, c.hidden // c.heads // 2).frequencies
    axes = (0,) * len(frequencies) + (1,) * len(frequencies)
    frequencies += frequencies

    def linear(y: Value, name: str, width: int) -> Value:
        return b.linear(y, f"{name}.weight", width, f"{name}.bias")

    def norm(y: Value, name: str) -> Value:
        if newer:
            return b.rms_norm(y, f"{name}.weight", EPS)
        return b.layer_norm(y, f"{name}.weight", f"{name}.bias", EPS)

    def block(x: Value, i: int) -> Value:
        at, n = f"{prefix}blocks.{i}.", c.hidden
        y, qkv = norm(x, at + "norm1"), at + "attn.qkv"
        q, k, v = (
            b.linear(y, qkv + ".weight", 3 * n, qkv + ".bias", (j * n, (j + 1) * n))
            for j in range(3)
        )
        q, k = (b.rope(part, c.heads, frequencies, False, axes=axes) for part in (q, k))
        # Layers come one after the other and keep nothing: they share the room for keys and values.
        a = b.attention(
            q, k, v, layer=0, heads=c.heads, kv_heads=c.heads, scale=(n // c.heads) ** -0.5,
            causal=False, segmented=c.window > 0 and i not in c.full,
        )  # fmt: skip
        x = b.add(x, linear(a, at + "attn.proj", n))
        y = norm(x, at + "norm2")
        if newer:
            gate, up = (linear(y, f"{at}mlp.{part}_proj", c.ffn) for part in ("gate", "up"))
            return b.add(x, linear(b.glu(gate, up, c.activation), at + "mlp.down_proj", n))
        h = b.activate(linear(y, at + "mlp.fc1", c.ffn), c.activation)
        return b.add(x, linear(h, at + "mlp.fc2", n))

    x = b.linear(
        b.features(CHANNELS * c.frames * c.patch**2), prefix + PATCHES + ".weight", c.hidden
    )
    for i in range(c.layers):
        x = block(x, i)
    x = norm(x, prefix + "merger.ln_q")
    return b.build(MOST_TOKENS * c.merge**2, b.select_rows(x), task="embed")


def _projector(checkpoint: Checkpoint, c: _Config, prefix: str) -> Program:
    b, width = Builder(checkpoint), c.hidden * c.merge**2
    first, second = prefix + "merger.mlp.0", prefix + "merger.mlp.2"
    x = b.select_rows(b.features(width))
    x = b.activate(b.linear(x, first + ".weight", width, first + ".bias"), "gelu")
    return b.build(1, b.linear(x, second + ".weight", c.out, second + ".bias"), task="embed")


def vision(checkpoint: Checkpoint, m: Recorded) -> GridVision:
    """The encoder of a Qwen2-VL or Qwen2.5-VL folder; m: its outer configuration. Raises
    CheckpointError or Unsupported."""
    name, family = checkpoint.path.name, str(checkpoint.metadata["model_type"])
    values, newer = checkpoint.metadata.get("vision_config"), family == "qwen2_5_vl"
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{name}: no vision_config")
    metadata = Recorded({**values, "model_type": f"{family}_vision"})
    inner = replace(checkpoint, metadata=metadata)
    c = _config(inner, newer)
    refuse_unread(inner, metadata)
    prefix = find_module(checkpoint, PATCHES).removesuffix(PATCHES)
    matrix = prefix + PATCHES + ".weight"
    conv = checkpoint.tensor(matrix, (c.hidden, CHANNELS, c.frames, c.patch, c.patch))
    flat = replace(conv, shape=(c.hidden, CHANNELS * c.frames * c.patch**2))
    b = Builder(replace(checkpoint, tensors=dict(checkpoint.tensors) | {matrix: flat}))
    tower = GridTower(_tower(b, c, prefix, newer), c.patch, c.merge, c.frames, c.window)
    settings = processor_settings(checkpoint)
    most = min(MOST_TOKENS, pixel_limits(settings)[1] // (c.patch * c.merge) ** 2)
    return GridVision(
        family, tower, _projector(checkpoint, c, prefix), Normalization.of(settings, name),
        token_id({"image_token_id": IMAGE_TOKEN} | dict(m), name, "image_token_id"), max(most, 1),
    )  # fmt: skip
