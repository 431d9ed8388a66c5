"""Which weights an adapter's modules are, whatever the checkpoint calls them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.checkpoint import Checkpoint
from octavo.models.names import GGUF_NAMES, HF_NAMES
from octavo.program import Linear, Program, Rope

PARTS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the checkpoint. heads: its rows lie in GGUF's interleaved order, per head."""

    tensor: str
    heads: int = 0


def adapter_targets(checkpoint: Checkpoint, program: Program) -> Mapping[str, Target]:
    """Modules, by their Hugging Face names, that adapters can change.

    Not those whose input is permuted for the sake of their weights: A expects it as it comes.
    """
    linears = [
        op
        for op in program.ops
        if isinstance(op, Linear) and not op.out.selected and op.weight.tensor.order is None
    ]
    if checkpoint.format == "hf":
        names = [op.weight.tensor.name for op in linears]
        return {name.removesuffix(".weight"): Target(name) for name in names}
    heads = {"q": 0, "k": 0}
    for op in program.ops:
        if isinstance(op, Rope) and op.interleaved:
            heads["k" if heads["q"] else "q"] = op.heads
            if heads["k"]:
                break
    out = {}
    known = {op.weight.tensor.name for op in linears}
    for layer in range(program.cache.layers):
        for part in PARTS:
            tensor = GGUF_NAMES[part].format(layer) + ".weight"
            if tensor in known:
                out[HF_NAMES[part].format(layer)] = Target(tensor, heads.get(part, 0))
    return out
