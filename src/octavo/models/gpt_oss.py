"""gpt-oss: experts with biases and a clamped SwiGLU, attention sinks, windows in every other layer.

Its folders hold all experts of a layer in one tensor, gates and ups in turn.
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
# Of the one clamped SwiGLU that is built: see Activation.
SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
SOFTMAX_OF_CHOSEN = 3  # as GGUF numbers it: equal to the softmax of all, normalised


def _matrices(checkpoint: Checkpoint, name: str, count: int) -> list[Stored | Computed]:
    """Of every expert, `[outputs, inputs]`: MXFP4 as imported, or floats stored transposed."""
    stacked = checkpoint.tensors.get(name)
    if stacked is None:
        parts = [checkpoint.tensor(f"{name}.{e}") for e in range(count)]
        return [p for p in parts if isinstance(p, Computed)]
    whole = checkpoint.tensor(name, (count, *stacked.shape[1:]))
    parts = [whole.part(e) for e in range(count)]
    return [Computed.transposed(p) for p in parts if isinstance(p, Stored)]


def _vectors(checkpoint: Checkpoint, name: str, count: int) -> list[Stored]:
    stacked = checkpoint.tensor(name)
    whole = checkpoint.tensor(name, (count, *stacked.shape[1:]))
    return [p for p in (whole.part(e) for e in range(count)) if isinstance(p, Stored)]


def _apart(checkpoint: Checkpoint, d: Decoder) -> Checkpoint:
    """With a matrix and a bias for every expert and part, as other families have them."""
    tensors: dict[str, Tensor] = dict(checkpoint.tensors)
    count = d.moe.count
    for i in range(d.shape.layers):
        prefix = d.name("experts", i) + "."
        for kind, suffix, read in (("weight", "", _matrices), ("bias", "_bias", _vectors)):
            both = read(checkpoint, f"{prefix}gate_up_proj{suffix}", count)
            down = read(checkpoint, f"{prefix}down_proj{suffix}", count)
            for e, (gate_up, last) in enumerate(zip(both, down, strict=True)):
                for part, first in (("gate_proj", 0), ("up_proj", 1)):
                    tensors[f"{prefix}{e}.{part}.{kind}"] = Computed.every(gate_up, first, 2)
                tensors[f"{prefix}{e}.down_proj.{kind}"] = last
    return replace(checkpoint, tensors=tensors)


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a gpt-oss checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint, NAMES)
    if not d.gguf:
        for key, value in SWIGLU.items():
            if d.meta.number(key) != value:
                raise Unsupported(f"{checkpoint.path.name}: another {key} than {value:g}")
        d = Decoder(_apart(checkpoint, d), NAMES)
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
