"""OPT: learned positions, layer norms before or after each block, ReLU.

The 350M model's embeddings are narrower than its layers: one projection widens them before the
first layer, another narrows the states before the head.
"""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.errors import Unsupported
from octavo.models.decoder import Decoder
from octavo.program import Program

_MODEL, _LAYER = "model.decoder.", "model.decoder.layers.{}."
NAMES = {
    "embed": _MODEL + "embed_tokens", "positions": _MODEL + "embed_positions",
    "norm": _MODEL + "final_layer_norm", "attn_norm": _LAYER + "self_attn_layer_norm",
    "ffn_norm": _LAYER + "final_layer_norm", "q": _LAYER + "self_attn.q_proj",
    "k": _LAYER + "self_attn.k_proj", "v": _LAYER + "self_attn.v_proj",
    "o": _LAYER + "self_attn.out_proj", "up": _LAYER + "fc1", "down": _LAYER + "fc2",
    "in": _MODEL + "project_in", "out": _MODEL + "project_out",
}  # fmt: skip
KEYS = {"ffn": "ffn_dim"}
FIRST = 2  # entry of position 0 in the position table
EPS = 1e-5  # which the configuration does not have


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of an OPT folder. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint, NAMES, KEYS, norms="layer", eps=EPS)
    if not d.meta.flag("layer_norm_elementwise_affine"):
        raise Unsupported(f"{checkpoint.path.name}: layer_norm_elementwise_affine is false")
    activation = d.activation("relu", "activation_function")
    before = d.meta.flag("do_layer_norm_before")
    last = not d.meta.flag("_remove_final_layer_norm") and before
    s, b = d.config, d.b
    width = d.meta.size("word_embed_proj_dim", s.hidden)
    x = b.embed(d.name("embed") + ".weight", s.vocabulary, width, replaceable=True)
    if width != s.hidden:
        x = d.linear(x, "in", s.hidden)
    table = d.name("positions") + ".weight"
    x = b.add(x, b.embed(table, s.context + FIRST, s.hidden, index="positions", offset=FIRST))
    for i in range(s.layers):
        y = d.attention(d.norm(x, "attn_norm", i) if before else x, i, None)
        x = b.add(x, y) if before else d.norm(b.add(x, y), "attn_norm", i)
        y = d.mlp(d.norm(x, "ffn_norm", i) if before else x, i, activation)
        x = b.add(x, y) if before else d.norm(b.add(x, y), "ffn_norm", i)
    x = b.select_rows(x)
    if last:
        x = d.norm(x, "norm")
    if width != s.hidden:
        x = d.linear(x, "out", width)
    return d.end(x)
