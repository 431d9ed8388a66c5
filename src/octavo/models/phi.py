"""Phi 1, 1.5 and 2: attention and feed-forward block side by side after one layer norm."""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.models.decoder import Decoder
from octavo.program import Program

NAMES = {
    "norm": "model.final_layernorm", "o": "model.layers.{}.self_attn.dense",
    "up": "model.layers.{}.mlp.fc1", "down": "model.layers.{}.mlp.fc2",
}  # fmt: skip


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a Phi 1 or 2 checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint, NAMES, norms="layer")
    rotation, activation = d.rotation(context, partial=True), d.activation("gelu_tanh")
    x = d.embed()
    for i in range(d.config.layers):
        y = d.norm(x, "attn_norm", i)
        x = d.b.add(d.b.add(x, d.attention(y, i, rotation)), d.mlp(y, i, activation))
    return d.build(x)
