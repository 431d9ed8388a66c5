"""Llama 2 and 3, Mistral, SmolLM2 and 3, TinyLlama, Yi: pre-norm, rotary GQA attention, SwiGLU.

Mixtral has experts instead of feed-forward blocks; the architecture of its GGUF files is "llama".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from octavo.checkpoint import Checkpoint
from octavo.models.decoder import Decoder
from octavo.models.windows import windows
from octavo.program import Program

NO_ROPE_INTERVAL = 4  # SmolLM3: every fourth layer has no rotary embedding


def _rotated(d: Decoder) -> list[bool]:
    """True for each layer that rotates queries and keys."""
    layers = d.config.layers
    if d.checkpoint.architecture != "smollm3":
        return [True] * layers
    interval = d.meta.size("no_rope_layer_interval", NO_ROPE_INTERVAL)
    wanted = d.meta.per_layer("no_rope_layers", layers)  # 1: with rotation
    return [bool(w) for w in wanted or ((i + 1) % interval for i in range(layers))]


def _windows(d: Decoder, rotated: list[bool]) -> list[int]:
    """The window of each layer; 0: none. SmolLM3 has windows only in layers without rotation."""
    if d.checkpoint.architecture == "smollm3" and not d.gguf:
        used = d.meta.flag("use_sliding_window")
        return windows(d, lambda i: used and not rotated[i])
    known = d.gguf or d.checkpoint.architecture in ("mistral", "mixtral")
    return [d.window if known else 0] * d.config.layers


def build(
    checkpoint: Checkpoint, context: int | None = None, names: Mapping[str, str] | None = None
) -> Program:
    """The forward pass of a llama checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint, names)
    # GGUF's converter interleaves the rows of q and k.
    rotation = replace(d.rotation(context), interleaved=d.gguf)
    activation, sparse, rotated = d.activation("silu"), d.has("router"), _rotated(d)
    x = d.embed()
    for i, window in enumerate(_windows(d, rotated)):
        y = d.norm(x, "attn_norm", i)
        x = d.b.add(x, d.attention(y, i, rotation if rotated[i] else None, window=window))
        y = d.norm(x, "ffn_norm", i)
        h = d.experts(y, i, activation, True) if sparse else d.glu(y, i, activation)
        x = d.b.add(x, h)
    return d.build(x)
