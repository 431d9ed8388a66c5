"""gpt-oss: experts with biases and a clamped SwiGLU, attention sinks, windows in every other layer.

Hugging Face folders hold all experts of a layer in one tensor, with rows of gate and up
alternating.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoint import Checkpoint, Computed, Stored, Tensor
from octavo.errors import Unsupported
from octavo.models.decoder import Decoder
from octavo.models.windows import windows
from octavo.program import Program

NAMES = {
    "router": "model.layers.{}.mlp.router",
    "gates": "model.layers.{}.mlp.experts.{{}}.gate_proj",
    "ups": "model.layers.{}.mlp.experts.{{}}.up_proj",
    "downs": "model.layers.{}.mlp.experts.{{}}.down_proj",
    "experts": "model.layers.{}.mlp.experts", "sinks": "model.layers.{}.self_attn.sinks",
}  # fmt: skip
# The one clamped SwiGLU that is implemented: see Activation.
SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
SOFTMAX_OF_CHOSEN = 3  # GGUF's expert_gating_func; equals a normalised softmax over all


def _matrices(checkpoint: Checkpoint, name: str, count: int) -> list[Stored | Computed]:
    """Each expert's matrix, `[outputs, inputs]`: MXFP4 as imported, or floats stored transposed."""
    stacked = checkpoint.tensors.get(name)
    if stacked is None:
        matrices = [checkpoint.tensor(f"{name}.{e}") for e in range(count)]
        return [m for m in matrices if isinstance(m, Computed)]
    whole = checkpoint.tensor(name, (count, *stacked.shape[1:]))
    matrices = [whole.part(e) for e in range(count)]
    return [Computed.transposed(m) for m in matrices if isinstance(m, Stored)]


def _vectors(checkpoint: Checkpoint, name: str, count: int) -> list[Stored]:
    """Each expert's bias."""
    stacked = checkpoint.tensor(name)
    whole = checkpoint.tensor(name, (count, *stacked.shape[1:]))
    return [v for v in (whole.part(e) for e in range(count)) if isinstance(v, Stored)]


def _split_experts(checkpoint: Checkpoint, d: Decoder) -> Checkpoint:
    """The checkpoint with a weight and a bias tensor for each projection of each expert."""
    tensors: dict[str, Tensor] = dict(checkpoint.tensors)
    count = d.moe.count
    for i in range(d.config.layers):
        prefix = d.name("experts", i) + "."
        for kind, suffix, read in (("weight", "", _matrices), ("bias", "_bias", _vectors)):
            both = read(checkpoint, f"{prefix}gate_up_proj{suffix}", count)
            down = read(checkpoint, f"{prefix}down_proj{suffix}", count)
            for e, (gate_up, last) in enumerate(zip(both, down, strict=True)):
                for module, first in (("gate_proj", 0), ("up_proj", 1)):
                    tensors[f"{prefix}{e}.{module}.{kind}"] = Computed.every(gate_up, first, 2)
                tensors[f"{prefix}{e}.down_proj.{kind}"] = last
    return replace(checkpoint, tensors=tensors)


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a gpt-oss checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint, NAMES)
    if not d.gguf:
        for key, value in SWIGLU.items():
            if d.meta.number(key) != value:
                raise Unsupported(f"{checkpoint.path.name}: another {key} than {value:g}")
        d = Decoder(_split_experts(checkpoint, d), NAMES)
    d.gate_by(SOFTMAX_OF_CHOSEN)
    rotation = d.rotation(context)
    x = d.embed()
    for i, window in enumerate(windows(d, lambda i: i % 2 == 0)):
        y = d.norm(x, "attn_norm", i)
        sinks = f"blk.{i}.attn_sinks.weight" if d.gguf else d.name("sinks", i)
        x = d.b.add(x, d.attention(y, i, rotation, window=window, sinks=sinks))
        y = d.norm(x, "attn_post" if d.gguf else "ffn_norm", i)
        x = d.b.add(x, d.experts(y, i, "swiglu_clamped", True))
    return d.build(x)
