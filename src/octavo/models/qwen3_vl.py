"""Qwen3-VL: Qwen2-VL's design with learned positions in the tower, fitted to each image's grid,
and the states of some of its layers beside the last: the first layers of the language model, a
Qwen 3, add them to an image's tokens (deepstack)."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from octavo.checkpoint import Checkpoint
from octavo.models import qwen2_vl
from octavo.models.decoder import Decoder
from octavo.models.grid import GridTower, GridVision
from octavo.models.metadata import Metadata, Recorded
from octavo.models.qwen_tower import (
    EPS,
    PATCHES,
    QwenTower,
    attention,
    linear,
    most_rows,
    most_tokens,
    placeholders,
    projector,
    read_tower,
    tower_builder,
    vision_config,
)
from octavo.models.unread import refuse_unread
from octavo.program import Program, Value
from octavo.vision.normalize import Normalization, processor_settings

SECTIONS = [24, 20, 20]  # transformers' default
DEEP = "deepstack_visual_indexes"


def text_model(checkpoint: Checkpoint) -> Checkpoint:
    """The language model of a folder, which is told how many layers add states."""
    inner = qwen2_vl.text_model(checkpoint, SECTIONS, turns=True)
    m = Metadata(vision_config(checkpoint)[0])
    return replace(inner, metadata=dict(inner.metadata) | {DEEP: m.get(DEEP)})


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a Qwen3-VL language model. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint)
    rotation, activation = d.rotation(context), d.activation("silu")
    deep = range(d.meta.get("n_deepstack_layers") or 0) if d.gguf else d.meta.get(DEEP) or ()
    if not isinstance(deep, list | tuple | range) or len(deep) > d.config.layers:
        raise d.meta.bad(DEEP, deep)
    x = d.embed()
    for i in range(d.config.layers):
        x = d.b.add(x, d.attention(d.norm(x, "attn_norm", i), i, rotation, qk_norm="heads"))
        x = d.b.add(x, d.glu(d.norm(x, "ffn_norm", i), i, activation))
        if i < len(deep):
            x = d.b.inject(x, (i + 1) * d.config.hidden)
    return d.build(x)


def _tower(checkpoint: Checkpoint, c: QwenTower, deep: list[int]) -> Program:
    b = tower_builder(checkpoint, c)

    def norm(x: Value, name: str) -> Value:
        return b.layer_norm(x, f"{name}.weight", f"{name}.bias", EPS)

    x = b.inject(linear(b, b.features(c.features), c.prefix + PATCHES, c.hidden), c.features)
    taps = []
    for i in range(c.layers):
        at = f"{c.prefix}blocks.{i}."
        x = b.add(x, attention(b, c, norm(x, at + "norm1"), at + "attn"))
        h = linear(b, norm(x, at + "norm2"), at + "mlp.linear_fc1", c.ffn)
        x = b.add(x, linear(b, b.activate(h, c.activation), at + "mlp.linear_fc2", c.hidden))
        taps += [x] if i in deep else []
    x = b.select_rows(norm(x, c.prefix + "merger.norm"))
    return b.build(most_rows(c), x, task="embed", taps=tuple(taps))


def vision(checkpoint: Checkpoint, m: Recorded) -> GridVision:
    """The encoder of a Qwen3-VL folder; m: its outer configuration. Raises CheckpointError or
    Unsupported."""
    name = checkpoint.path.name
    inner, metadata = vision_config(checkpoint)
    c, own = read_tower(inner), Metadata(inner)
    deep, positions = own.get(DEEP), own.size("num_position_embeddings")
    if not isinstance(deep, list | tuple) or not all(type(i) is int for i in deep):
        raise own.bad(DEEP, deep)
    if sorted(set(deep)) != list(deep) or not all(0 <= i < c.layers for i in deep):
        raise own.bad(DEEP, deep)
    if isqrt(positions) ** 2 != positions:
        raise own.bad("num_position_embeddings", positions)
    refuse_unread(inner, metadata)
    table = checkpoint.tensor(c.prefix + "pos_embed.weight", (positions, c.hidden))
    first, second = "linear_fc1", "linear_fc2"
    projectors = [projector(checkpoint, c, *(f"{c.prefix}merger.{n}" for n in (first, second)))]
    for i in range(len(deep)):
        at = f"{c.prefix}deepstack_merger_list.{i}."
        projectors.append(projector(checkpoint, c, at + first, at + second, at + "norm"))
    return GridVision(
        "qwen3_vl", GridTower(_tower(checkpoint, c, list(deep)), c.patch, c.merge, c.frames),
        tuple(projectors), Normalization.of(processor_settings(checkpoint), name),
        *placeholders(m, name), most_tokens(checkpoint, c), table=table,
    )  # fmt: skip
