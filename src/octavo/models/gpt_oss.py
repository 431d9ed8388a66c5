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
}
LIMIT = 7.0  # where gates and ups are clamped


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


def _apart(checkpoint: Checkpoint, layers: int, count: int) -> Checkpoint:
    """With a matrix and a bias for every expert and part, as other families have them."""
    tensors: dict[str, Tensor] = dict(checkpoint.tensors)
    for i in range(layers):
        prefix = f"model.layers.{i}.mlp.experts."
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
    d = Decoder(checkpoint, NAMES, eps=1e-5)
    if d.meta.get("swiglu_limit") not in (None, LIMIT):
        raise Unsupported(f"{checkpoint.path.name}: another swiglu_limit than {LIMIT:g}")
    if not d.gguf:
        d = Decoder(_apart(checkpoint, d.shape.layers, d.shape.experts), NAMES, eps=1e-5)
    rotation = d.rotation(context, 150000.0)
    sinks = "blk.{}.attn_sinks.weight" if d.gguf else "model.layers.{}.self_attn.sinks"
    every_other = [0 if i % 2 else d.shape.window for i in range(d.shape.layers)]
    x = d.embed()
    for i, window in enumerate(windows(d, every_other)):
        y = d.norm(x, "attn_norm", i)
        x = d.b.add(x, d.attention(y, i, rotation, window=window, sinks=sinks.format(i)))
        y = d.norm(x, "attn_post" if d.gguf else "ffn_norm", i)
        x = d.b.add(x, d.experts(y, i, "swiglu_clamped", True))
    d.head(x)
    return d.build()
