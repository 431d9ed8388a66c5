"""StarCoder 2: rotary GQA attention with layer norms, biases and a plain GELU block."""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.errors import Unsupported
from octavo.models.decoder import Decoder
from octavo.program import Program

NAMES = {"up": "model.layers.{}.mlp.c_fc", "down": "model.layers.{}.mlp.c_proj"}
KEYS = {"layer_norm_eps": "norm_epsilon"}


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a StarCoder 2 checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint, NAMES, KEYS, norms="layer", eps=1e-5)
    if d.meta.get("hidden_act") not in (None, "gelu_pytorch_tanh"):
        raise Unsupported(f"{checkpoint.path.name}: another activation than gelu_pytorch_tanh")
    rotation = d.rotation(context)
    x = d.embed()
    for i in range(d.shape.layers):
        y = d.norm(x, "attn_norm", i)
        x = d.b.add(x, d.attention(y, i, rotation, window=d.shape.window))
        x = d.b.add(x, d.mlp(d.norm(x, "ffn_norm", i), i, "gelu_tanh"))
    d.head(x)
    return d.build()
