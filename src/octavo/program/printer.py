"""A program as an assembly listing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import groupby

from octavo.program.inputs import Input
from octavo.program.ops import Op, Value, Weight
from octavo.program.program import LayerCache, Program


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
    operands = []
    for f in fields(op):
        value = getattr(op, f.name)
        if f.name == "out" or value == f.default:
            continue
        text = _operand(value)
        operands.append(text if isinstance(value, Value | Weight) else f"{f.name}={text}")
    rows = "S" if op.out.selected else "T"
    return f"%{op.out.id:<4} {f'[{rows}, {op.out.width}]':<12} = {name:<11} {', '.join(operands)}"


def _input(declared: Input) -> str:
    shape = ", ".join(map(str, declared.shape))
    return f"{declared.name} [{shape}] {declared.type}" + (", optional" * declared.optional)


def _cache(cache: tuple[LayerCache, ...]) -> Iterator[str]:
    """A line for each run of layers that keep the same."""
    first = 0
    for shape, run in groupby(cache):
        last = first + len(list(run)) - 1
        window = f", window {shape.window}" if shape.window else ""
        layers = f"layer {first}" if first == last else f"layers {first} to {last}"
        yield f"; cache {layers}: {shape.kv_heads} x {shape.head_dim}{window}"
        first = last + 1


def listing(program: Program) -> str:
    """One operation a line; T are the step's tokens, S the rows that need logits, E those with
    embeddings of their own."""
    p = program
    head = [
        f"; {p.task}, vocabulary {p.vocabulary}, context {p.context}",
        *(f"; input {_input(declared)}" for declared in p.inputs),
        *_cache(p.cache),
        f"; output {_operand(p.output)}, hidden {_operand(p.hidden)}",
    ]
    return "\n".join([*head, *map(_line, p.ops)])
