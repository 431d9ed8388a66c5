"""How the inputs of quantized linear layers are rounded."""

from __future__ import annotations

from octavo.program import Experts, Program


def resolve(asked: str, program: Program, isa: str) -> str:
    """What is asked for, or what `auto` is: int16 where tiles multiply two digits at little cost,
    and where experts are routed to, because a router close to a tie makes another of rounding."""
    if asked != "auto":
        return asked
    routed = any(isinstance(op, Experts) for op in program.ops)
    return "int16" if isa == "amx" or routed else "auto"


def second_lines(activations: str, reader: str = "") -> int | None:
    """How many of the eight lines of four features that are a group of 32 have values of two
    digits; None: values share a scale with their row, not with their group, and all have two.
    reader: "head", "gate" for gated projections.

    The head decides by small differences of logits, and runs for few rows: `auto` gives it two
    digits everywhere. Gated projections are half of a model's weights, and the least sensitive.
    """
    match activations:
        case "int16":
            return None
        case "int8":
            return 0
        case "auto":
            return {"head": 8, "gate": 1}.get(reader, 2)
    raise ValueError(f"activations are auto, int8 or int16, not {activations!r}")
