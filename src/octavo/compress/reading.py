"""How much of a model's weights a decoded token reads, which bounds its speed from memory."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.checkpoint import Checkpoint
from octavo.errors import OctavoError
from octavo.models import build_program
from octavo.program import Experts, Linear, Route, Weight


def reads(checkpoint: Checkpoint, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Bytes of weights that a decoded token reads: of the model, and of one whose tensors take
    `sizes`. 0 for models that Octavo cannot run."""
    shares, tensors = read_shares(checkpoint), checkpoint.tensors
    shares = {n: share for n, share in shares.items() if n in sizes}  # of stored ones
    before = sum(share * tensors[n].nbytes for n, share in shares.items())
    return round(before), round(sum(share * sizes[n] for n, share in shares.items()))


def read_shares(checkpoint: Checkpoint) -> dict[str, float]:
    """The share of each matrix that a decoded token reads, by the name it is stored under: all of
    it, of experts those that it is routed to. Tables whose rows are looked up are left out. Nothing
    is known of models that Octavo cannot run."""
    try:
        ops = build_program(checkpoint).ops
    except OctavoError:
        return {}
    chosen = {op.out: op.top_k for op in ops if isinstance(op, Route)}
    out: dict[str, float] = {}
    weights: tuple[Weight, ...]
    for op in ops:
        if isinstance(op, Linear):
            weights, share = (op.weight,), 1.0
        elif isinstance(op, Experts):
            weights, count = (*op.gate, *op.up, *op.down), len(op.gate)
            share = chosen.get(op.routes, count) / count
        else:
            continue
        out |= dict.fromkeys((w.tensor.name.partition("[")[0] for w in weights), share)
    return out
