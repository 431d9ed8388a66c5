"""A model's forward pass as a short straight-line program over a small vocabulary of operations."""

from octavo.program.builder import Builder
from octavo.program.ops import (
    Activate,
    Activation,
    Add,
    Attention,
    Embed,
    Glu,
    LayerNorm,
    Linear,
    Op,
    Program,
    RmsNorm,
    Rope,
    SelectRows,
    Task,
    Value,
    Weight,
)
from octavo.program.printer import listing

__all__ = [
    "Activate",
    "Activation",
    "Add",
    "Attention",
    "Builder",
    "Embed",
    "Glu",
    "LayerNorm",
    "Linear",
    "Op",
    "Program",
    "RmsNorm",
    "Rope",
    "SelectRows",
    "Task",
    "Value",
    "Weight",
    "listing",
]
