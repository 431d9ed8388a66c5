"""Gemma 1: llama with scaled embeddings and GeGLU.

Norms multiply by 1 + w. Hugging Face stores w, GGUF 1 + w.
"""

from __future__ import annotations

import math

from octavo.checkpoint import Checkpoint
from octavo.models.decoder import Decoder
from octavo.program import Program


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a Gemma 1 checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint, norm_offset=0.0 if checkpoint.format == "gguf" else 1.0)
    activation = d.activation("gelu_tanh")
    if activation == "gelu":  # the first files say "gelu" and mean its approximation
        activation = "gelu_tanh"
    rotation = d.rotation(context)
    x = d.embed(math.sqrt(d.config.hidden))
    for i in range(d.config.layers):
        x = d.b.add(x, d.attention(d.norm(x, "attn_norm", i), i, rotation))
        x = d.b.add(x, d.glu(d.norm(x, "ffn_norm", i), i, activation))
    return d.build(x)
