"""A model's forward pass as a straight-line program of a few kinds of operations."""

from octavo.program.builder import Builder
from octavo.program.inputs import Input
from octavo.program.ops import (
    Activate,
    Activation,
    Add,
    Attention,
    Embed,
    EmbedIndex,
    Experts,
    Features,
    Glu,
    Inject,
    LayerNorm,
    Linear,
    Op,
    Permute,
    RmsNorm,
    Rope,
    Route,
    SelectRows,
    Softcap,
    Value,
    Weight,
)
from octavo.program.printer import listing
from octavo.program.program import LayerCache, Program, Task
from octavo.program.tree import Branch, branches

__all__ = [
    "Activate",
    "Activation",
    "Add",
    "Attention",
    "Branch",
    "Builder",
    "Embed",
    "EmbedIndex",
    "Experts",
    "Features",
    "Glu",
    "Inject",
    "Input",
    "LayerCache",
    "LayerNorm",
    "Linear",
    "Op",
    "Permute",
    "Program",
    "RmsNorm",
    "Rope",
    "Route",
    "SelectRows",
    "Softcap",
    "Task",
    "Value",
    "Weight",
    "branches",
    "listing",
]
