"""Gemma 2: scaled embeddings, four norms per layer, GeGLU, soft caps, windows in every other layer.

Norms multiply by 1 + w. Hugging Face stores w, GGUF 1 + w.
"""

from __future__ import annotations

import math

from octavo.checkpoint import Checkpoint
from octavo.models.decoder import Decoder
from octavo.models.windows import windows
from octavo.program import Program

NAMES = {
    "attn_post": "model.layers.{}.post_attention_layernorm",
    "ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "ffn_post": "model.layers.{}.post_feedforward_layernorm",
}
LAYERS_27B = 46  # the one size whose query scale is not 1/sqrt(head_dim)


def query_scale(d: Decoder, largest: int) -> float:
    """The factor of attention scores. largest: number of layers of the one size for which GGUF
    files imply another factor."""
    s = d.config
    if not d.gguf:
        return 1 / math.sqrt(d.meta.number("query_pre_attn_scalar"))
    return 1 / math.sqrt(s.hidden / s.heads if s.layers == largest else s.head_dim)


def cap(d: Decoder, key: str) -> float:
    """The soft cap of scores or logits that `key` sets; 0: none."""
    return d.meta.number(key) if d.meta.get(key) else 0.0


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a Gemma 2 checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint, NAMES, norm_offset=0.0 if checkpoint.format == "gguf" else 1.0)
    scale, score_cap = query_scale(d, LAYERS_27B), cap(d, "attn_logit_softcapping")
    rotation, activation = d.rotation(context), d.activation("gelu_tanh", "hidden_activation")
    x = d.embed(math.sqrt(d.config.hidden))
    for i, window in enumerate(windows(d, lambda i: i % 2 == 0)):
        y = d.attention(
            d.norm(x, "attn_norm", i), i, rotation, window=window, scale=scale, softcap=score_cap
        )
        x = d.b.add(x, d.norm(y, "attn_post", i))
        y = d.glu(d.norm(x, "ffn_norm", i), i, activation)
        x = d.b.add(x, d.norm(y, "ffn_post", i))
    return d.build(x, cap(d, "final_logit_softcapping"))
