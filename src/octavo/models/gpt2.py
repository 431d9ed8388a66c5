"""GPT-2: learned positions, layer norms, GELU; its Hugging Face matrices are stored transposed."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoint import Checkpoint, Computed, Stored, Tensor
from octavo.models.decoder import Decoder
from octavo.program import Program

_LAYER = "transformer.h.{}."
NAMES = {
    "embed": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f",
    "attn_norm": _LAYER + "ln_1", "ffn_norm": _LAYER + "ln_2", "qkv": _LAYER + "attn.c_attn",
    "o": _LAYER + "attn.c_proj", "up": _LAYER + "mlp.c_fc", "down": _LAYER + "mlp.c_proj",
}  # fmt: skip
KEYS = {
    "layers": "n_layer", "hidden": "n_embd", "ffn": "n_inner", "heads": "n_head",
    "context": "n_positions", "layer_norm_eps": "layer_norm_epsilon",
}  # fmt: skip
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def _upright(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its matrices transposed to `[outputs, inputs]`."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        lying = name.endswith(TRANSPOSED) and len(tensor.shape) == 2
        if lying and isinstance(tensor, Stored | Computed):
            tensor = Computed.transposed(tensor)
        tensors[name] = tensor
    return replace(checkpoint, tensors=tensors)


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a GPT-2 checkpoint. Raises CheckpointError or Unsupported."""
    gguf = checkpoint.format == "gguf"
    d = Decoder(checkpoint if gguf else _upright(checkpoint), NAMES, KEYS, norms="layer")
    activation = d.activation("gelu_tanh", "activation_function")
    s = d.config
    scale = s.head_dim**-0.5 if d.meta.flag("scale_attn_weights", True) else 1.0
    by_layer = d.meta.flag("scale_attn_by_inverse_layer_idx")
    positions = d.b.embed(d.name("positions") + ".weight", s.context, s.hidden, index="positions")
    x = d.b.add(d.embed(), positions)
    for i in range(s.layers):
        y, each = d.norm(x, "attn_norm", i), scale / (i + 1) if by_layer else scale
        x = d.b.add(x, d.attention(y, i, None, scale=each))
        x = d.b.add(x, d.mlp(d.norm(x, "ffn_norm", i), i, activation))
    return d.build(x)
