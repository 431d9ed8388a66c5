"""Phi 3, 3.5 and 4: llama with fused projections, partial rotation and LongRoPE."""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.models.decoder import Decoder
from octavo.program import Program

NAMES = {"up": "model.layers.{}.mlp.gate_up_proj"}


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a Phi 3 checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint, NAMES)
    rotation, activation = d.rotation(context, partial=True), d.activation("silu")
    x = d.embed()
    for i in range(d.config.layers):
        y = d.norm(x, "attn_norm", i)
        x = d.b.add(x, d.attention(y, i, rotation, window=d.window))
        x = d.b.add(x, d.glu(d.norm(x, "ffn_norm", i), i, activation))
    return d.build(x)
