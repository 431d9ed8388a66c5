"""Rows selected early: what follows the last attention is computed for those alone."""

from __future__ import annotations

from dataclasses import fields, replace

from octavo.backends.fusion import EMITTING_ONLY
from octavo.program import (
    Activate,
    Add,
    Attention,
    Glu,
    LayerNorm,
    Linear,
    Op,
    Program,
    RmsNorm,
    SelectRows,
    Value,
)

BY_ROW = (Linear, RmsNorm, LayerNorm, Glu, Activate, Add)  # a row of theirs depends on no other


def select_early(program: Program) -> tuple[Program, frozenset[int]]:
    """A program with its rows selected right after its last attention, not at its end, and the
    numbers of the values between. Of most of a prompt's tokens nothing else of the last layer is
    read than keys and values.

    The program itself and no values if it generates no text or its last layer has parts that need
    all rows.
    """
    selects = [op for op in program.ops if isinstance(op, SelectRows)]
    if program.task != "generate" or program.taps or len(selects) != 1:
        return program, frozenset()
    select = selects[0]
    results = (program.output, program.hidden)
    if select.out in results or not all(value.selected for value in results):
        return program, frozenset()
    users: dict[int, list[Op]] = {}
    for op in program.ops:
        for value in op.inputs:
            users.setdefault(value.id, []).append(op)
    moved: set[int] = set()
    for op in reversed(program.ops):
        read = users.get(op.out.id, [])
        later = all(user is select or user.out.id in moved for user in read)
        if isinstance(op, BY_ROW) and read and later and not op.out.selected:
            moved.add(op.out.id)
    given = {v.id for op in program.ops if op.out.id in moved for v in op.inputs} - moved
    makers = [op for op in program.ops if op.out.id in given]
    attended = [op for op in makers if isinstance(op, Attention)]
    reads = [user for op in attended for user in users[op.out.id]]
    linear = all(isinstance(user, Linear) and user.out.id in moved for user in reads)
    # What these give lies in no buffer to select rows from.
    others = any(isinstance(op, EMITTING_ONLY) for op in makers if op not in attended)
    if not attended or not linear or others:
        return program, frozenset()
    return _rewritten(program, select, moved, given)


def _rewritten(
    program: Program, select: SelectRows, moved: set[int], given: set[int]
) -> tuple[Program, frozenset[int]]:
    """As `select_early` gives it. moved: values to be computed for selected rows. given: those that
    they are computed from, each followed by a selection of its own."""
    number = max(op.out.id for op in program.ops)
    ops: list[Op] = []
    chosen: dict[int, Value] = {}  # selected rows, by the number of the value they are of
    for op in program.ops:
        out = op.out
        if op is select:
            chosen[out.id] = chosen[op.x.id]
            continue
        if out.id in moved or out.selected:
            named = ((f.name, getattr(op, f.name)) for f in fields(op) if f.name != "out")
            inputs = {name: chosen[v.id] for name, v in named if isinstance(v, Value)}
            chosen[out.id] = replace(out, selected=True)
            op = replace(op, out=chosen[out.id], **inputs)
        ops.append(op)
        if out.id in given:
            number += 1
            chosen[out.id] = Value(number, out.width, True)
            ops.append(SelectRows(chosen[out.id], out))
    early = frozenset(chosen[value].id for value in (moved | given) - {select.x.id})
    output, hidden = chosen[program.output.id], chosen[program.hidden.id]
    return replace(program, ops=tuple(ops), output=output, hidden=hidden), early
