"""OLMo 3: OLMo 2 with windows in three of four layers, which have a rotation of their own."""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.models.decoder import Decoder
from octavo.models.olmo2 import NAMES
from octavo.models.windows import windows
from octavo.program import Program

PATTERN = 4  # every fourth layer sees everything


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of an OLMo 3 folder. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint, NAMES, eps=1e-5)
    full = d.rotation(context)
    local = d.rotation(context, kind="sliding_attention")
    every_fourth = [0 if (i + 1) % PATTERN == 0 else d.shape.window for i in range(d.shape.layers)]
    x = d.embed()
    for i, window in enumerate(windows(d, every_fourth)):
        y = d.attention(x, i, local if window else full, window=window, qk_norm="all")
        x = d.b.add(x, d.norm(y, "attn_post", i))
        x = d.b.add(x, d.norm(d.glu(x, i, "silu"), "ffn_post", i))
    d.head(x)
    return d.build()
