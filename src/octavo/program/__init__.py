"""A model's forward pass as a short straight-line program over a small vocabulary of operations."""

from octavo.program.builder import Builder
from octavo.program.ops import (
    Add,
    Attention,
    Embed,
    Glu,
    Linear,
    Op,
    Program,
    RmsNorm,
    Rope,
    SelectRows,
    Value,
    Weight,
)
from octavo.program.printer import listing

__all__ = [
    "Add",
    "Attention",
    "Builder",
    "Embed",
    "Glu",
    "Linear",
    "Op",
    "Program",
    "RmsNorm",
    "Rope",
    "SelectRows",
    "Value",
    "Weight",
    "listing",
]
