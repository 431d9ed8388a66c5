"""Llama 2 and 3, Mistral, SmolLM2 and 3, TinyLlama, Yi: pre-norm, rotary GQA attention, SwiGLU.

Mixtral is this with experts in place of the feed-forward block; its GGUF files say "llama".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from octavo.checkpoint import Checkpoint
from octavo.models.decoder import Decoder
from octavo.program import Program

ROTATED_OF_FOUR = 4  # SmolLM3 leaves out the rotation in every fourth layer


def _rotated(d: Decoder) -> list[bool]:
    """Which layers rotate queries and keys."""
    layers = range(d.shape.layers)
    if d.checkpoint.architecture != "smollm3":
        return [True for _ in layers]
    wanted = d.meta.get("no_rope_layers")  # 1: with rotation
    if isinstance(wanted, list) and len(wanted) == len(layers):
        return [bool(w) for w in wanted]
    interval = d.meta.size("no_rope_layer_interval", ROTATED_OF_FOUR)
    return [(i + 1) % interval != 0 for i in layers]


def build(
    checkpoint: Checkpoint, context: int | None = None, names: Mapping[str, str] | None = None
) -> Program:
    """The forward pass of a llama checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint, names)
    # GGUF's converter interleaves the rows of q and k.
    rotation = replace(d.rotation(context), interleaved=d.gguf)
    x = d.embed()
    for i, rotated in enumerate(_rotated(d)):
        y = d.norm(x, "attn_norm", i)
        x = d.b.add(x, d.attention(y, i, rotation if rotated else None, window=d.shape.window))
        y = d.norm(x, "ffn_norm", i)
        h = d.experts(y, i, "silu", True) if d.shape.experts else d.glu(y, i, "silu")
        x = d.b.add(x, h)
    d.head(x)
    return d.build()
