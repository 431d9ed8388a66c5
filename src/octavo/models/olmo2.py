"""OLMo 2: norms after each block instead of before it, and over all heads of queries and keys.

OLMo 3 adds windows in three of four layers, whose rotary embedding is not rescaled. The
architecture of its GGUF files is "olmo2".
"""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.models import rope
from octavo.models.decoder import Decoder
from octavo.models.rope import Rotation
from octavo.models.windows import windows
from octavo.program import Program

NAMES = {
    "attn_post": "model.layers.{}.post_attention_layernorm",
    "ffn_post": "model.layers.{}.post_feedforward_layernorm",
}
PATTERN = 4  # every fourth layer has full attention


def _rotations(d: Decoder, context: int | None, windowed: bool) -> tuple[Rotation, Rotation]:
    """Rotary embeddings of layers with a window, and of the others."""
    if not d.gguf and windowed:
        kinds = ("sliding_attention", "full_attention")
        local, full = (d.rotation(context, kind) for kind in kinds)
        return local, full
    full = d.rotation(context)
    if not windowed:
        return full, full
    base = d.meta.number("rope.freq_base", 10000.0)
    return rope.plain(d.meta.number("rope.freq_base_swa", base), d.config.head_dim), full


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of an OLMo 2 or 3 checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint, NAMES)
    windowed = d.checkpoint.architecture == "olmo3" or (d.gguf and d.window > 0)
    local, full = _rotations(d, context, windowed)
    layers = d.config.layers
    sizes = windows(d, lambda i: (i + 1) % PATTERN != 0) if windowed else [0] * layers
    activation = d.activation("silu")
    x = d.embed()
    for i, window in enumerate(sizes):
        y = d.attention(x, i, local if window else full, window=window, qk_norm="all")
        x = d.b.add(x, d.norm(y, "attn_post", i))
        x = d.b.add(x, d.norm(d.glu(x, i, activation), "ffn_post", i))
    return d.build(x)
