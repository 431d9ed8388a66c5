"""Qwen 3, dense and with experts: llama with norms on the heads of queries and keys."""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.models.decoder import Decoder
from octavo.models.windows import windows
from octavo.program import Program


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a Qwen 3 checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint)
    rotation = d.rotation(context)
    normalize = d.gguf or d.meta.get("norm_topk_prob") is True
    none = [0] * d.shape.layers
    seen = windows(d, none) if d.meta.get("use_sliding_window") else none
    x = d.embed()
    for i, window in enumerate(seen):
        y = d.norm(x, "attn_norm", i)
        x = d.b.add(x, d.attention(y, i, rotation, window=window, qk_norm="heads"))
        y = d.norm(x, "ffn_norm", i)
        sparse = d.has("router", i)
        x = d.b.add(x, d.experts(y, i, "silu", normalize) if sparse else d.glu(y, i, "silu"))
    d.head(x)
    return d.build()
