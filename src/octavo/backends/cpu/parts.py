"""Parts of a program that a step can leave out."""

from __future__ import annotations

from octavo.backends.cpu.lower import Lowered
from octavo.backends.fused import SelectOp
from octavo.program import Value


def residual_parts(lowered: Lowered) -> list[range]:
    """Operations whose result is only added to a value, in its place: without them that value goes
    on as it is, and the rest computes the program without them. Of selected rows, they may read
    what these were selected from."""
    effects = [op.effects for op in lowered.ops]
    reads = [{v.id for v in (*e.reads, *_some(e.source))} for e in effects]
    made = [{v.id for v in (*e.writes, *_some(e.act))} for e in effects]
    maker = {value: i for i, values in enumerate(made) for value in values}
    out = []
    for last, e in enumerate(effects):
        if e.residual is None or len(e.writes) != 1:
            continue
        before, after = e.residual.id, e.writes[0].id
        first = maker[before] + 1
        made_by = lowered.ops[maker[before]]
        given = {before} | ({made_by.op.x.id} if isinstance(made_by, SelectOp) else set())
        inside = set[int]().union(*made[first:last])
        own = set[int]().union(*reads[first : last + 1]) <= inside | given
        later = set[int]().union(*reads[last + 1 :]) & inside
        if lowered.buffer_of[before] == lowered.buffer_of[after] and own and not later:
            out.append(range(first, last + 1))
    return out


def _some(value: Value | None) -> tuple[Value, ...]:
    return () if value is None else (value,)
