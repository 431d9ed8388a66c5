"""Qwen2-VL and Qwen2.5-VL: a tower for images in their own proportions, whose patches are rotated
along two axes; squares of them become tokens, which the language model rotates along three.

Qwen2.5-VL has the norms and the feed-forward blocks of its language model, and windows in most
layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError
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
from octavo.program import Builder, Program, Value
from octavo.vision.normalize import Normalization, processor_settings

SECTIONS = [16, 24, 24]  # transformers' default


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


def text_model(
    checkpoint: Checkpoint, sections: list[int] = SECTIONS, turns: bool = False
) -> Checkpoint:
    """The language model of a folder, with a rotation along three axes. sections: pairs of each
    where the folder does not say. turns: they take turns."""
    outer, inner = checkpoint.metadata, nested(checkpoint).metadata["text_config"]
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"{checkpoint.path.name}: text_config is {str(inner)[:40]}")
    key = "rope_scaling" if inner.get("rope_scaling") else "rope_parameters"
    parameters = inner.get(key) or {}
    if not isinstance(parameters, Mapping):
        raise CheckpointError(f"{checkpoint.path.name}: {key} is {str(parameters)[:40]}")
    tied = bool(inner.get("tie_word_embeddings") or outer.get("tie_word_embeddings"))
    metadata = dict(inner) | {
        key: {"mrope_section": sections} | dict(parameters) | {"mrope_interleaved": turns},
        "model_type": f"{outer['model_type']}_text", "tie_word_embeddings": tied,
    }  # fmt: skip
    return replace(checkpoint, metadata=metadata)


def _windows(inner: Checkpoint, c: QwenTower) -> tuple[int, frozenset[int]]:
    """Tokens a side of a window, and the layers without. Raises CheckpointError."""
    m = Metadata(inner)
    window, full = m.size("window_size") // c.merge // c.patch, m.get("fullatt_block_indexes")
    if not window:
        raise m.bad("window_size", m.get("window_size"))
    if not isinstance(full, list | tuple) or not all(type(i) is int for i in full):
        raise m.bad("fullatt_block_indexes", full)
    return window, frozenset(full)


def _first(b: Builder, c: QwenTower) -> Program:
    """Qwen2-VL's tower."""

    def norm(x: Value, name: str) -> Value:
        return b.layer_norm(x, f"{name}.weight", f"{name}.bias", EPS)

    x = b.linear(b.features(c.features), c.prefix + PATCHES + ".weight", c.hidden)
    for i in range(c.layers):
        at = f"{c.prefix}blocks.{i}."
        x = b.add(x, attention(b, c, norm(x, at + "norm1"), at + "attn"))
        h = linear(b, norm(x, at + "norm2"), at + "mlp.fc1", c.ffn)
        x = b.add(x, linear(b, b.activate(h, c.activation), at + "mlp.fc2", c.hidden))
    x = norm(x, c.prefix + "merger.ln_q")
    return b.build(most_rows(c), b.select_rows(x), task="embed")


def _second(b: Builder, c: QwenTower, full: frozenset[int]) -> Program:
    """Qwen2.5-VL's tower, with windows in all layers but these."""

    def norm(x: Value, name: str) -> Value:
        return b.rms_norm(x, f"{name}.weight", EPS)

    x = b.linear(b.features(c.features), c.prefix + PATCHES + ".weight", c.hidden)
    for i in range(c.layers):
        at = f"{c.prefix}blocks.{i}."
        x = b.add(x, attention(b, c, norm(x, at + "norm1"), at + "attn", segmented=i not in full))
        y = norm(x, at + "norm2")
        gate, up = (linear(b, y, f"{at}mlp.{part}_proj", c.ffn) for part in ("gate", "up"))
        x = b.add(x, linear(b, b.glu(gate, up, c.activation), at + "mlp.down_proj", c.hidden))
    x = norm(x, c.prefix + "merger.ln_q")
    return b.build(most_rows(c), b.select_rows(x), task="embed")


def vision(checkpoint: Checkpoint, m: Recorded) -> GridVision:
    """The encoder of a Qwen2-VL or Qwen2.5-VL folder; m: its outer configuration. Raises
    CheckpointError or Unsupported."""
    name, family = checkpoint.path.name, str(checkpoint.metadata["model_type"])
    inner, metadata = vision_config(checkpoint)
    c, window = read_tower(inner, first=family == "qwen2_vl"), 0
    if family == "qwen2_vl":
        program = _first(tower_builder(checkpoint, c), c)
    else:
        window, full = _windows(inner, c)
        program = _second(tower_builder(checkpoint, c), c, full)
    refuse_unread(inner, metadata)
    mlp = c.prefix + "merger.mlp."
    return GridVision(
        family, GridTower(program, c.patch, c.merge, c.frames, window),
        (projector(checkpoint, c, mlp + "0", mlp + "2"),),
        Normalization.of(processor_settings(checkpoint), name), *placeholders(m, name),
        most_tokens(checkpoint, c),
    )  # fmt: skip
