"""OLMoE: experts whose weights are not normalised, and norms over all heads of queries and keys."""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.models.decoder import Decoder
from octavo.program import Program


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of an OLMoE checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint, eps=1e-5)
    d.refuse("clip_qkv", "attention.clamp_kqv")
    rotation = d.rotation(context)
    normalize = d.meta.get("norm_topk_prob") is True
    x = d.embed()
    for i in range(d.shape.layers):
        x = d.b.add(x, d.attention(d.norm(x, "attn_norm", i), i, rotation, qk_norm="all"))
        x = d.b.add(x, d.experts(d.norm(x, "ffn_norm", i), i, "silu", normalize))
    d.head(x)
    return d.build()
