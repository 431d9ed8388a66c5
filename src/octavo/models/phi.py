"""Phi 1, 1.5 and 2: attention and feed-forward block side by side after one layer norm."""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.errors import Unsupported
from octavo.models.decoder import Decoder
from octavo.program import Program

NAMES = {
    "norm": "model.final_layernorm", "o": "model.layers.{}.self_attn.dense",
    "up": "model.layers.{}.mlp.fc1", "down": "model.layers.{}.mlp.fc2",
}  # fmt: skip


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a Phi 1 or 2 checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint, NAMES, norms="layer", eps=1e-5)
    d.refuse("qk_layernorm")
    if d.meta.get("hidden_act") not in (None, "gelu_new", "gelu_pytorch_tanh"):
        raise Unsupported(f"{checkpoint.path.name}: another activation than gelu_new")
    rotation = d.rotation(context)
    x = d.embed()
    for i in range(d.shape.layers):
        y = d.norm(x, "attn_norm", i)
        x = d.b.add(d.b.add(x, d.attention(y, i, rotation)), d.mlp(y, i, "gelu_tanh"))
    d.head(x)
    return d.build()
