"""Gemma 3 text: Gemma 2 with norms on the heads of queries and keys, and without caps.

Five of six layers see a window and use rotary base 10,000; every sixth sees everything and uses
the checkpoint's base and scaling.
"""

from __future__ import annotations

import math

from octavo.checkpoint import Checkpoint
from octavo.models import rope
from octavo.models.decoder import Decoder
from octavo.models.gemma2 import NAMES
from octavo.models.rope import Rotation
from octavo.models.windows import windows
from octavo.program import Program

LOCAL_BASE = 10000.0
PATTERN = 6  # every sixth layer is global
LAYERS_27B = 62  # the one size whose query scale is not 1/sqrt(head_dim)


def _rotations(d: Decoder, context: int | None) -> tuple[Rotation, Rotation]:
    """Of layers with a window, and of the others."""
    full = d.rotation(context, 1e6)
    nested = d.meta.get("rope_parameters")
    if isinstance(nested, dict) and "sliding_attention" in nested:
        return d.rotation(context, LOCAL_BASE, "sliding_attention"), full
    base = d.meta.number("rope.freq_base_swa" if d.gguf else "rope_local_base_freq", LOCAL_BASE)
    return rope.plain(base, d.shape.head_dim), full


def _scale(d: Decoder) -> float:
    s = d.shape
    if not d.gguf:
        return 1 / math.sqrt(d.meta.number("query_pre_attn_scalar", 256.0))
    width = s.hidden / s.heads if s.layers == LAYERS_27B else s.head_dim
    return 1 / math.sqrt(width)


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a Gemma 3 text checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint, NAMES, norm_offset=0.0 if checkpoint.format == "gguf" else 1.0)
    d.refuse("attn_logit_softcapping", "final_logit_softcapping")
    local, full = _rotations(d, context)
    layers = range(d.shape.layers)
    every_sixth = [0 if i % PATTERN == PATTERN - 1 else d.shape.window for i in layers]
    x = d.embed(math.sqrt(d.shape.hidden))
    for i, window in enumerate(windows(d, every_sixth)):
        y = d.attention(
            d.norm(x, "attn_norm", i), i, local if window else full, window=window,
            qk_norm="heads", scale=_scale(d),
        )  # fmt: skip
        x = d.b.add(x, d.norm(y, "attn_post", i))
        y = d.glu(d.norm(x, "ffn_norm", i), i, "gelu_tanh")
        x = d.b.add(x, d.norm(y, "ffn_post", i))
    d.head(x)
    return d.build()
