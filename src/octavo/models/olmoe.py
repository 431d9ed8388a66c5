"""OLMoE: experts, with weights that are not normalised, and norms over all heads of q and k."""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.models.decoder import SOFTMAX, Decoder
from octavo.program import Program


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of an OLMoE checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint)
    d.gate_by(SOFTMAX)
    rotation, activation = d.rotation(context), d.activation("silu")
    normalize = d.meta.flag("expert_weights_norm" if d.gguf else "norm_topk_prob")
    x = d.embed()
    for i in range(d.config.layers):
        x = d.b.add(x, d.attention(d.norm(x, "attn_norm", i), i, rotation, qk_norm="all"))
        x = d.b.add(x, d.experts(d.norm(x, "ffn_norm", i), i, activation, normalize))
    return d.build(x)
