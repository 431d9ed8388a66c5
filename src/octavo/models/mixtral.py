"""Mixtral: llama with experts, whose tensors have other names."""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.models import llama
from octavo.program import Program

_MOE = "model.layers.{}.block_sparse_moe."
NAMES = {
    "router": _MOE + "gate", "gates": _MOE + "experts.{{}}.w1", "ups": _MOE + "experts.{{}}.w3",
    "downs": _MOE + "experts.{{}}.w2",
}  # fmt: skip


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a Mixtral folder. Raises CheckpointError or Unsupported."""
    return llama.build(checkpoint, context, NAMES)
