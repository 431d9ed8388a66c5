"""Qwen 2 and 2.5: llama with biases on queries, keys and values."""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.models.decoder import Decoder
from octavo.models.windows import windows
from octavo.program import Program


def _windows(d: Decoder) -> list[int]:
    """Layers from `max_window_layers` on, if windows are in use at all."""
    if d.gguf or not d.meta.get("use_sliding_window"):
        return [0] * d.shape.layers
    first = d.meta.size("max_window_layers", d.shape.layers)
    return windows(d, [d.shape.window if i >= first else 0 for i in range(d.shape.layers)])


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a Qwen 2 checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint)
    rotation = d.rotation(context)
    x = d.embed()
    for i, window in enumerate(_windows(d)):
        x = d.b.add(x, d.attention(d.norm(x, "attn_norm", i), i, rotation, window=window))
        x = d.b.add(x, d.glu(d.norm(x, "ffn_norm", i), i, "silu"))
    d.head(x)
    return d.build()
