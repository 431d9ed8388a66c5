"""How the inputs of quantized linear layers are rounded."""

from __future__ import annotations

import math

from octavo.program import Experts, Program

WIDE = 3.0  # `auto`: groups whose largest value exceeds this many rms of their row have two digits


def resolve(asked: str, program: Program, isa: str) -> str:
    """What is asked for, or what `auto` is: int16 where tiles multiply two digits at little cost,
    and where experts are routed to, because a router close to a tie makes another of rounding."""
    if asked != "auto":
        return asked
    routed = any(isinstance(op, Experts) for op in program.ops)
    return "int16" if isa == "amx" or routed else "auto"


def threshold(activations: str, head: bool) -> float | None:
    """By how many rms of its row a group's largest value must exceed it for the group to have two
    digits; None: values share a scale with their row, not with their group. The head decides by
    small differences of logits, and runs for few rows: `auto` gives it two digits."""
    if activations == "int16":
        return None
    if activations == "int8":
        return math.inf
    if activations != "auto":
        raise ValueError(f"activations are auto, int8 or int16, not {activations!r}")
    return 0.0 if head else WIDE
