"""Which linear layers of a program share an input, and which of them make up a block."""

from __future__ import annotations

import re
from dataclasses import dataclass

from octavo.checkpoint import Tensor
from octavo.program import Experts, Linear, Program, Value, Weight


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share an input. at: the operation before which it is known; layers: the
    matrices of weights, by name; routed: the expert whose layers these are, inner for its down
    projection, whose input is computed by the others."""

    at: int
    input: Value
    layers: tuple[str, ...]
    routed: tuple[Experts, int] | None = None
    inner: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """Operations `[begin, end)` that read one value of those before them, such as attention with
    its norm, and the groups in it."""

    begin: int
    end: int
    groups: tuple[Group, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(name for g in self.groups for name in g.layers)


_ROWS = re.compile(r"\[(\d+):(\d+)\]$")


def whole(tensor: Tensor) -> tuple[str, slice]:
    """The name of the matrix that a tensor is some rows of, and which."""
    cut = _ROWS.search(tensor.name)
    if cut is None:
        return tensor.name, slice(None)
    return tensor.name[: cut.start()], slice(int(cut[1]), int(cut[2]))


def blocks(program: Program, wanted: set[str]) -> list[Block]:
    """The blocks that have layers among `wanted`, in order; what lies between belongs to the next.

    A tensor that is used more than once is in the first of its groups.
    """
    groups = _groups(program, wanted)
    last = {v.id: i for i, op in enumerate(program.ops) for v in op.inputs}
    out: list[Block] = []
    alive: set[int] = set()
    begin = 0
    for i, op in enumerate(program.ops):
        alive = {v for v in alive | {op.out.id} if last.get(v, -1) > i}
        if len(alive) <= 1 or i + 1 == len(program.ops):
            here = tuple(g for g in groups if begin <= g.at <= i)
            if here:
                out.append(Block(begin, i + 1, here))
                begin = i + 1
    return out


def _groups(program: Program, wanted: set[str]) -> list[Group]:
    readers: dict[int, list[tuple[int, Linear]]] = {}
    for i, op in enumerate(program.ops):
        if isinstance(op, Linear):
            readers.setdefault(op.x.id, []).append((i, op))
    out: list[Group] = []
    left = set(wanted)

    def take(*weights: Weight) -> tuple[str, ...]:
        names = dict.fromkeys(whole(w.tensor)[0] for w in weights)
        found = tuple(n for n in names if n in left)
        left.difference_update(found)
        return found

    for i, op in enumerate(program.ops):
        if isinstance(op, Linear):
            if names := take(*(other.weight for _, other in readers[op.x.id])):
                out.append(Group(i, op.x, names))
        elif isinstance(op, Experts):
            for e in range(len(op.gate)):
                if names := take(op.gate[e], op.up[e]):
                    out.append(Group(i, op.x, names, (op, e)))
                if names := take(op.down[e]):
                    out.append(Group(i, op.x, names, (op, e), inner=True))
    return out
