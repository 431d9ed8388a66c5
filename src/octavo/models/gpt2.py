"""GPT-2: learned positions, layer norms, GELU; its Hugging Face matrices are stored transposed."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoint import Checkpoint, Computed, Stored, Tensor
from octavo.errors import Unsupported
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
    """With matrices as rows of outputs, and with the prefix that some files leave out."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        full = name if name.startswith(("transformer.", "lm_head.")) else "transformer." + name
        if name.endswith(TRANSPOSED) and isinstance(tensor, Stored) and len(tensor.shape) == 2:
            tensor = Computed.transposed(tensor)
        tensors[full] = tensor
    return replace(checkpoint, tensors=tensors)


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a GPT-2 checkpoint. Raises CheckpointError or Unsupported."""
    gguf = checkpoint.format == "gguf"
    d = Decoder(checkpoint if gguf else _upright(checkpoint), NAMES, KEYS, norms="layer", eps=1e-5)
    if d.meta.get("activation_function") not in (None, "gelu_new", "gelu_pytorch_tanh"):
        raise Unsupported(f"{checkpoint.path.name}: another activation than gelu_new")
    d.refuse("scale_attn_by_inverse_layer_idx", "add_cross_attention")
    s = d.shape
    positions = d.b.embed(d.name("positions") + ".weight", s.context, s.hidden, index="positions")
    x = d.b.add(d.embed(), positions)
    for i in range(s.layers):
        x = d.b.add(x, d.attention(d.norm(x, "attn_norm", i), i, None))
        x = d.b.add(x, d.mlp(d.norm(x, "ffn_norm", i), i, "gelu_tanh"))
    d.head(x)
    return d.build()
