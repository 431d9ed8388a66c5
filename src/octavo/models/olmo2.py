"""OLMo 2: norms after each block instead of before it, and over all heads of queries and keys."""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.models.decoder import Decoder
from octavo.program import Program

NAMES = {
    "attn_post": "model.layers.{}.post_attention_layernorm",
    "ffn_post": "model.layers.{}.post_feedforward_layernorm",
}


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of an OLMo 2 checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint, NAMES, eps=1e-5)
    rotation = d.rotation(context)
    x = d.embed()
    for i in range(d.shape.layers):
        y = d.attention(x, i, rotation, qk_norm="all")
        x = d.b.add(x, d.norm(y, "attn_post", i))
        x = d.b.add(x, d.norm(d.glu(x, i, "silu"), "ffn_post", i))
    d.head(x)
    return d.build()
