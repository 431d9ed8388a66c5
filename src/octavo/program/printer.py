"""A program as an assembly listing."""

from __future__ import annotations

import re
from dataclasses import fields

from octavo.program.ops import Op, Program, Value, Weight


def _operand(value: object) -> str:
    if isinstance(value, Value):
        return f"%{value.id}"
    if isinstance(value, Weight):
        plus = f"+{value.offset:g}" if value.offset else ""
        return f"{value.tensor.name}{plus}:{value.tensor.type.name.lower()}"
    if isinstance(value, tuple):
        return f"[{len(value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _line(op: Op) -> str:
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", op.name).lower()
    parts = []
    for f in fields(op):
        value = getattr(op, f.name)
        if f.name == "out" or value == f.default:
            continue
        text = _operand(value)
        parts.append(text if isinstance(value, Value | Weight) else f"{f.name}={text}")
    rows = "S" if op.out.selected else "T"
    return f"%{op.out.id:<4} {f'[{rows}, {op.out.width}]':<12} = {name:<11} {', '.join(parts)}"


def listing(program: Program) -> str:
    """One operation a line; T are the step's tokens, S the rows that need logits."""
    cache = program.cache
    head = (
        f"; vocabulary {program.vocabulary}, context {program.context}, "
        f"cache {cache.layers} x {cache.kv_heads} x {cache.head_dim}"
    )
    return "\n".join([head, *map(_line, program.ops)])
