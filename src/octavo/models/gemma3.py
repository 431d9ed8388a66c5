"""Gemma 3 text: Gemma 2 with norms on each head of queries and keys.

Five of six layers have a window and rotary base 10,000; every sixth has full attention and the
checkpoint's base and scaling. EmbeddingGemma is bidirectional and has no head.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError
from octavo.models import rope
from octavo.models.decoder import Decoder
from octavo.models.gemma2 import NAMES, cap, query_scale
from octavo.models.rope import Rotation
from octavo.models.windows import windows
from octavo.program import Program

LOCAL_BASE = 10000.0
PATTERN = 6  # every sixth layer is global
LAYERS_27B = 62  # the one size whose query scale is not 1/sqrt(head_dim)


def text_model(checkpoint: Checkpoint) -> Checkpoint:
    """The language model of a multimodal Gemma 3 folder."""
    outer, inner = checkpoint.metadata, checkpoint.metadata.get("text_config")
    if not isinstance(inner, dict):
        raise CheckpointError(f"{checkpoint.path.name}: no text_config")
    metadata: dict[str, Any] = {k: v for k, v in outer.items() if k != "text_config"}
    metadata |= inner | {"model_type": "gemma3_text"}
    if "tie_word_embeddings" in outer:
        metadata["tie_word_embeddings"] = outer["tie_word_embeddings"]
    return replace(checkpoint, metadata=metadata)


def _rotations(d: Decoder, context: int | None) -> tuple[Rotation, Rotation]:
    """Rotary embeddings of layers with a window, and of the others."""
    if d.gguf:
        base = d.meta.number("rope.freq_base_swa", LOCAL_BASE)
        return rope.plain(base, d.config.head_dim), d.rotation(context)
    local = d.rotation(context, "sliding_attention", "rope_local_base_freq")
    return local, d.rotation(context, "full_attention")


def _windows(d: Decoder, causal: bool) -> list[int]:
    """The window of each layer; 0: none."""
    n = PATTERN if d.gguf else d.meta.size("sliding_window_pattern")
    found = windows(d, lambda i: (i + 1) % n != 0)
    # a bidirectional window has half its tokens on each side of the query
    return found if causal else [window // 2 + 1 if window else 0 for window in found]


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a Gemma 3 text checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint, NAMES, norm_offset=0.0 if checkpoint.format == "gguf" else 1.0)
    causal = d.gguf or not d.meta.flag("use_bidirectional_attention")
    local, full = _rotations(d, context)
    scale, activation = query_scale(d, LAYERS_27B), d.activation("gelu_tanh", "hidden_activation")
    x = d.embed(math.sqrt(d.config.hidden))
    for i, window in enumerate(_windows(d, causal)):
        y = d.attention(
            d.norm(x, "attn_norm", i), i, local if window else full, window=window,
            qk_norm="heads", scale=scale, causal=causal,
        )  # fmt: skip
        x = d.b.add(x, d.norm(y, "attn_post", i))
        y = d.glu(d.norm(x, "ffn_norm", i), i, activation)
        x = d.b.add(x, d.norm(y, "ffn_post", i))
    if not causal:
        return d.states(x)
    return d.build(x, cap(d, "final_logit_softcapping"))
