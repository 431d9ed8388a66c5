"""Seed-OSS: llama with biases on queries, keys and values."""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.models.decoder import Decoder
from octavo.program import Program


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a Seed-OSS checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint)
    rotation, activation = d.rotation(context), d.activation("silu")
    x = d.embed()
    for i in range(d.config.layers):
        x = d.b.add(x, d.attention(d.norm(x, "attn_norm", i), i, rotation))
        # what GGUF calls post_attention_norm is the norm before the feed-forward block
        y = d.norm(x, "attn_post" if d.gguf else "ffn_norm", i)
        x = d.b.add(x, d.glu(y, i, activation))
    return d.build(x)
