"""Vision transformers, CLIP's and SigLIP's: patches of an image to a state for each.

A patch goes through a linear layer (stored as a convolution) and gets its position's embedding.
CLIP has a class token before the patches, whose row of pixels is zero, and a norm before the
layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoint import Checkpoint, Computed, Tensor, TensorType
from octavo.errors import CheckpointError, Unsupported
from octavo.models.activations import activation
from octavo.models.metadata import Metadata, Recorded
from octavo.models.unread import refuse_unread
from octavo.program import Activation, Builder, Program, Value

CHANNELS = 3
PATCH = "embeddings.patch_embedding.weight"
POSITIONS = "embeddings.position_embedding.weight"
CLASS = "embeddings.class_embedding"


@dataclass(frozen=True)
class VitConfig:
    """Sizes of a vision transformer. size, patch: pixels a side."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    size: int
    patch: int
    eps: float
    activation: Activation

    @property
    def side(self) -> int:
        """Patches a side."""
        return self.size // self.patch


@dataclass(frozen=True)
class Vit:
    """A tower. leading: rows before those of the patches, whose pixels are zero."""

    config: VitConfig
    leading: int
    program: Program


def _config(checkpoint: Checkpoint) -> VitConfig:
    m, name = Metadata(checkpoint), checkpoint.path.name
    c = VitConfig(
        layers=m.size("num_hidden_layers"), hidden=m.size("hidden_size"),
        ffn=m.size("intermediate_size"), heads=m.size("num_attention_heads"),
        size=m.size("image_size"), patch=m.size("patch_size"), eps=m.number("layer_norm_eps"),
        activation=activation(checkpoint, "hidden_act", m.get("hidden_act")),
    )  # fmt: skip
    if c.hidden % c.heads or c.size < c.patch or c.layers > len(checkpoint.tensors):
        raise CheckpointError(
            f"{name}: {c.layers} vision layers of {c.hidden} features over {c.heads} heads, images "
            f"of {c.size} pixels in patches of {c.patch}"
        )
    if m.size("num_channels") != CHANNELS:
        raise Unsupported(f"{name}: images of {m.size('num_channels')} channels")
    return c


def vision_tower(
    checkpoint: Checkpoint, kind: str, layer: int | None = None, uneven: bool = False
) -> Vit:
    """The tower that `vision_config` describes, a `kind` of model_type: up to a layer's states as
    they are, counted like transformers' `hidden_states`, or to the end and its norm. uneven: the
    positions of patches are rounded as Idefics3 does. Raises CheckpointError or Unsupported."""
    values, name = checkpoint.metadata.get("vision_config"), checkpoint.path.name
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{name}: no vision_config")
    values = {**values, "model_type": kind}
    prefixes = [n.removesuffix(PATCH) for n in checkpoint.tensors if n.endswith(PATCH)]
    if len(prefixes) != 1:
        raise CheckpointError(f"{name}: {len(prefixes)} tensors {PATCH!r}, which should be one")
    metadata = Recorded(values)
    inner = replace(checkpoint, metadata=metadata)
    c = _config(inner)
    if layer is not None:
        counted = layer + c.layers + 1 if layer < 0 else layer
        most = c.layers if kind == "clip_vision_model" else c.layers - 1
        if not 0 <= counted <= most:
            raise Unsupported(f"{name}: vision_feature_layer is {layer} of {c.layers}")
        layer = counted
    refuse_unread(inner, metadata)
    tensors, leading = _embeddings(checkpoint, c, prefixes[0], uneven)
    b = Builder(replace(checkpoint, tensors=tensors))
    return Vit(c, leading, _program(b, c, prefixes[0], leading, layer))


def _embeddings(
    checkpoint: Checkpoint, c: VitConfig, prefix: str, uneven: bool
) -> tuple[dict[str, Tensor], int]:
    """The tensors with the convolution as a matrix, the class token's embedding added to that of
    its position, and positions in the order of patches; and whether there is a class token."""
    conv = checkpoint.tensor(prefix + PATCH, (c.hidden, CHANNELS, c.patch, c.patch))
    matrix = replace(conv, shape=(c.hidden, CHANNELS * c.patch**2))
    leading = int(prefix + CLASS in checkpoint.tensors)
    count = c.side**2 + leading
    table = checkpoint.tensor(prefix + POSITIONS, (count, c.hidden))
    tensors = dict(checkpoint.tensors) | {prefix + PATCH: matrix}
    token = checkpoint.tensor(prefix + CLASS, (c.hidden,)) if leading else None

    def read() -> npt.NDArray[Any]:
        values = table.vector()
        if token is not None:
            values[0] += token.vector()
        return values[_uneven_places(c.side)] if uneven else values

    if leading or uneven:
        tensors[prefix + POSITIONS] = Computed(
            table.name, TensorType.F32, table.shape, 4 * count * c.hidden, read
        )
    return tensors, leading


def _uneven_places(side: int) -> npt.NDArray[np.int64]:
    """The position of each patch as Idefics3 finds it: the interval that i / side falls into, in
    fp32, where it may fall below the one it begins."""
    bounds = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)
    at = np.arange(side, dtype=np.float32) * (np.float32(1) / np.float32(side))
    line = np.searchsorted(bounds, np.minimum(at, np.float32(1 - 1e-6)), side="right")
    places: npt.NDArray[np.int64] = (line[:, None] * side + line).reshape(-1)
    return places


def _program(b: Builder, c: VitConfig, prefix: str, leading: int, layer: int | None) -> Program:
    bias = prefix + PATCH.replace("weight", "bias")
    x = b.linear(
        b.features(CHANNELS * c.patch**2), prefix + PATCH, c.hidden, bias if b.has(bias) else None
    )
    count = c.side**2 + leading
    x = b.add(x, b.embed(prefix + POSITIONS, count, c.hidden, index="positions"))
    if b.has(prefix + "pre_layrnorm.weight"):  # as it is spelt
        x = _norm(b, c, x, prefix + "pre_layrnorm")
    for i in range(c.layers if layer is None else layer):
        x = _layer(b, c, f"{prefix}encoder.layers.{i}.", x)
    if layer is None:
        x = _norm(b, c, x, prefix + "post_layernorm")
    return b.build(count, b.select_rows(x), task="embed")


def _norm(b: Builder, c: VitConfig, x: Value, name: str) -> Value:
    return b.layer_norm(x, name + ".weight", name + ".bias", c.eps)


def _layer(b: Builder, c: VitConfig, name: str, x: Value) -> Value:
    def linear(y: Value, module: str, width: int) -> Value:
        return b.linear(y, f"{name}{module}.weight", width, f"{name}{module}.bias")

    y = _norm(b, c, x, name + "layer_norm1")
    q, k, v = (linear(y, f"self_attn.{p}_proj", c.hidden) for p in "qkv")
    # Layers come one after the other and keep nothing: they share the room for keys and values.
    a = b.attention(
        q, k, v, layer=0, heads=c.heads, kv_heads=c.heads,
        scale=(c.hidden // c.heads) ** -0.5, causal=False,
    )  # fmt: skip
    x = b.add(x, linear(a, "self_attn.out_proj", c.hidden))
    h = linear(_norm(b, c, x, name + "layer_norm2"), "mlp.fc1", c.ffn)
    return b.add(x, linear(b.activate(h, c.activation), "mlp.fc2", c.hidden))
