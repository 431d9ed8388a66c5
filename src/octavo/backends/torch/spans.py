"""Computes a program over many sequences, a span of its operations at a time.

What lies between spans are the values that later operations read. They can be looked at there: the
inputs of any linear layer, without changing results.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from octavo.backends.torch.reference import Reference, ReferenceInputs, tree
from octavo.checkpoint import Tensor
from octavo.checkpoint.dequantize import dequantize
from octavo.program import Embed, Experts, Program, Value

F32 = npt.NDArray[np.float32]
MEMORY = 64 << 20  # bytes of values that are held; others lie in a file
TABLE_ROWS = 4096  # of an embedding table that are read at a time


class KeptValues:
    """Values of every sequence that are still to be read, those beyond `memory` bytes in a file
    without a name in `folder`."""

    def __init__(self, folder: Path, memory: int) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)
        self._free = memory
        self._held: dict[tuple[int, int], torch.Tensor] = {}
        self._places: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self._gaps: dict[int, list[int]] = {}  # places in the file by their size
        self._end = 0

    def put(self, value: int, sequence: int, x: torch.Tensor) -> None:
        key, size = (value, sequence), x.numel() * 4
        if size <= self._free:
            self._free -= size
            self._held[key] = x.contiguous()
            return
        gaps = self._gaps.setdefault(size, [])
        at = gaps.pop() if gaps else self._end
        self._end = max(self._end, at + size)
        self._file.seek(at)
        self._file.write(x.contiguous().numpy().data)
        self._places[key] = at, tuple(x.shape)

    def get(self, value: int, sequence: int) -> torch.Tensor:
        key = value, sequence
        if key in self._held:
            return self._held[key]
        at, shape = self._places[key]
        out = np.empty(shape, np.float32)
        self._file.seek(at)
        self._file.readinto(out.data)
        return torch.from_numpy(out)

    def drop(self, value: int, sequence: int) -> None:
        key = value, sequence
        if key in self._held:
            self._free += self._held.pop(key).numel() * 4
        else:
            at, shape = self._places.pop(key)
            self._gaps.setdefault(int(np.prod(shape)) * 4, []).append(at)

    def close(self) -> None:
        self._file.close()


class Spans:
    """A program and the tokens `[sequences, length]` that it is computed for.

    folder: where values lie that do not fit into `memory`. read: the values of a tensor; it is
    asked once in each span, so that weights may change between them.
    """

    def __init__(
        self, program: Program, tokens: npt.NDArray[np.int32], folder: Path,
        read: Callable[[Tensor], F32] = dequantize, memory: int = MEMORY,
    ) -> None:  # fmt: skip
        self.program, self.tokens = program, torch.from_numpy(tokens.astype(np.int64))
        self._read = read
        self._kept = KeptValues(folder, memory)
        self._last = {v.id: i for i, op in enumerate(program.ops) for v in op.inputs}
        self._alive: set[int] = set()
        length = tokens.shape[1]
        self._positions, self._visible = tree(list(range(-1, length - 1)))

    def close(self) -> None:
        self._kept.close()

    @torch.inference_mode()
    def run(self, begin: int, end: int) -> None:
        """Computes the operations `[begin, end)`; those before `begin` have been computed."""
        ops, reference = self.program.ops[begin:end], Reference(self.program, self._read)
        tables = {op.out.id: self._table(op) for op in ops if isinstance(op, Embed)}
        read = {v.id for op in ops for v in op.inputs} & self._alive
        made = {op.out.id for op in ops}
        after = {i for i in self._alive | made if self._last.get(i, 0) >= end}
        for sequence in range(len(self.tokens)):
            values = {i: self._kept.get(i, sequence) for i in sorted(read)}
            inputs = self._inputs(sequence)
            for at, op in enumerate(ops, begin):
                if isinstance(op, Embed):
                    values[op.out.id] = _rows(*tables[op.out.id], self._index(op, sequence))
                else:
                    values[op.out.id] = reference.run(op, values, inputs)
                for v in op.inputs:
                    if self._last[v.id] == at:
                        values.pop(v.id, None)
            for i in sorted(self._alive - after):
                self._kept.drop(i, sequence)
            for i in sorted(made & after):
                self._kept.put(i, sequence, values[i])
        self._alive = after

    def _inputs(self, sequence: int) -> ReferenceInputs:
        none = torch.zeros(0)
        index = {"ids": self.tokens[sequence], "positions": self._positions}
        return ReferenceInputs(index, self._visible, self._positions, none, none.long())  # type: ignore[arg-type]

    def _index(self, op: Embed, sequence: int) -> torch.Tensor:
        """The rows of a table that a sequence looks up."""
        if op.index == "ids":
            return self.tokens[sequence] + op.offset
        segment = torch.zeros_like(self._positions)  # all tokens are of the first
        return (self._positions if op.index == "positions" else segment) + op.offset

    def _table(self, op: Embed) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of a table that any sequence looks up: their numbers, ascending, and values."""
        used = torch.cat([self._index(op, i) for i in range(len(self.tokens))]).unique()
        table, parts = op.table.tensor, []
        for begin in range(0, table.shape[0], TABLE_ROWS):
            end = min(begin + TABLE_ROWS, table.shape[0])
            here = used[(used >= begin) & (used < end)] - begin
            if len(here):
                part = torch.from_numpy(np.array(dequantize(table.rows(begin, end))))
                parts.append((part[here] + op.table.offset) * op.scale)
        return used, torch.cat(parts)

    # -- what lies between spans --------------------------------------------------------------

    def inputs(self, value: Value) -> Iterator[F32]:
        """A value of each sequence, `[length, width]`."""
        for sequence in range(len(self.tokens)):
            yield self._kept.get(value.id, sequence).numpy()

    @torch.inference_mode()
    def expert_inputs(self, op: Experts, expert: int, *, inner: bool) -> Iterator[F32]:
        """The inputs of one expert, of the tokens that are routed to it; inner: those of its down
        projection."""
        reference = Reference(self.program, self._read)
        for sequence in range(len(self.tokens)):
            x, routes = (self._kept.get(v.id, sequence) for v in (op.x, op.routes))
            rows = x[routes[:, expert].nonzero()[:, 0]]
            yield (reference.expert(rows, op, expert) if inner else rows).numpy()


def _rows(numbers: torch.Tensor, values: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return values[torch.searchsorted(numbers, wanted)]
