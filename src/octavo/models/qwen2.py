"""Qwen 2 and 2.5: llama with biases on queries, keys and values."""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.models.decoder import Decoder
from octavo.models.windows import windows
from octavo.program import Program


def layer_windows(d: Decoder) -> list[int]:
    """The window of each layer, 0 without one: layers from `max_window_layers` on have one if
    `use_sliding_window` is set. GGUF files have none."""
    if d.gguf:
        return [0] * d.config.layers
    first, used = d.meta.get("max_window_layers"), d.meta.flag("use_sliding_window")
    if not isinstance(first, int) or first < 0:
        raise d.meta.bad("max_window_layers", first)
    return windows(d, lambda i: i >= first, used)


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a Qwen 2 checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint)
    rotation, activation = d.rotation(context), d.activation("silu")
    x = d.embed()
    for i, window in enumerate(layer_windows(d)):
        x = d.b.add(x, d.attention(d.norm(x, "attn_norm", i), i, rotation, window=window))
        x = d.b.add(x, d.glu(d.norm(x, "ffn_norm", i), i, activation))
    return d.build(x)
