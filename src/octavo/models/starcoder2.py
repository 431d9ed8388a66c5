"""StarCoder 2: rotary GQA attention with layer norms, biases and a plain GELU block."""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.models.decoder import Decoder
from octavo.program import Program

NAMES = {"up": "model.layers.{}.mlp.c_fc", "down": "model.layers.{}.mlp.c_proj"}
KEYS = {"layer_norm_eps": "norm_epsilon"}


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a StarCoder 2 checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint, NAMES, KEYS, norms="layer")
    rotation, activation = d.rotation(context), d.activation("gelu_tanh")
    x = d.embed()
    for i in range(d.config.layers):
        y = d.norm(x, "attn_norm", i)
        x = d.b.add(x, d.attention(y, i, rotation, window=d.window))
        x = d.b.add(x, d.mlp(d.norm(x, "ffn_norm", i), i, activation))
    return d.build(x)
