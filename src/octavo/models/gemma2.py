"""Gemma 2: scaled embeddings, four norms a layer, GeGLU, soft caps, windows in every other layer.

Hugging Face stores norm weights as w for 1 + w; GGUF stores 1 + w.
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


def _numbers(d: Decoder) -> tuple[float, float, float]:
    """Query scale, and the caps of scores and logits (0: none)."""

    def cap(key: str) -> float:
        return d.meta.number(key) if d.meta.get(key) else 0.0

    s = d.shape
    if d.gguf:
        square = s.hidden / s.heads if s.layers == LAYERS_27B else s.head_dim
    else:
        square = d.meta.number("query_pre_attn_scalar", 256.0)
    return square**-0.5, cap("attn_logit_softcapping"), cap("final_logit_softcapping")


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a Gemma 2 checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint, NAMES, norm_offset=0.0 if checkpoint.format == "gguf" else 1.0)
    scale, score_cap, logit_cap = _numbers(d)
    rotation = d.rotation(context)
    every_other = [0 if i % 2 else d.shape.window for i in range(d.shape.layers)]
    x = d.embed(math.sqrt(d.shape.hidden))
    for i, window in enumerate(windows(d, every_other)):
        y = d.attention(
            d.norm(x, "attn_norm", i), i, rotation, window=window, scale=scale, softcap=score_cap
        )
        x = d.b.add(x, d.norm(y, "attn_post", i))
        y = d.glu(d.norm(x, "ffn_norm", i), i, "gelu_tanh")
        x = d.b.add(x, d.norm(y, "ffn_post", i))
    d.head(x, logit_cap)
    return d.build()
