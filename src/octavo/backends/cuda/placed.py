"""A program in a device's memory: its launches with the tensors that they read and write."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from octavo.backends.base import BLOCK
from octavo.backends.cuda.device import operations
from octavo.backends.cuda.formats import MatrixSpec
from octavo.backends.cuda.graphs import Call
from octavo.backends.cuda.inputs import StepBlock, StepSize
from octavo.backends.cuda.launches import (
    Buffer,
    CacheRef,
    Columns,
    Given,
    Launch,
    MatrixRef,
    Numbers,
    ScratchRef,
    UnpackedRef,
    VectorRef,
    WorkRef,
)
from octavo.backends.cuda.memory import DeviceMemory, array_of, unpacks
from octavo.backends.cuda.pack import TYPES, allocate, pack, pack_vector
from octavo.backends.cuda.tensors import Matrix, Work
from octavo.checkpoint.progress import Advance


class Placed:
    """Weights, buffers and cache, all of `memory`. packed: makes a matrix on the device."""

    def __init__(
        self, memory: DeviceMemory, device: torch.device, progress: Advance,
        packed: Callable[[MatrixSpec, torch.device], Matrix] = pack,
    ) -> None:  # fmt: skip
        self.memory, self.device = memory, device
        self._functions = operations(device)
        self.matrices = []
        for spec in memory.launches.matrices:
            self.matrices.append(packed(spec, device))
            progress(spec.stored)
        self._vectors = {r: pack_vector(r, a, device) for r, a in memory.vectors.items()}
        self._numbers = {
            n: torch.tensor(n.values, dtype=TYPES[a.dtype], device=device)
            for n, a in memory.numbers.items()
        }
        self._buffers = [allocate(array, device) for array in memory.buffers]
        self.block = StepBlock(memory.inputs, memory.embeddings, device)
        self._work = {
            w: Work(*(allocate(a, device) for a in arrays.values()))
            for w, arrays in memory.work.items()
        }
        self._scratch = {s: allocate(a, device) for s, a in memory.scratch.items()}
        self._unpacked = allocate(memory.unpacked, device)
        self.drawn = allocate(memory.drawn, device)
        self.cache = allocate(memory.cache, device)

    @property
    def nbytes(self) -> tuple[int, int, int]:
        """Bytes of weights, buffers and cache that were allocated."""
        weights = [t for m in self.matrices for t in m if isinstance(t, torch.Tensor)]
        weights += [*self._vectors.values(), *self._numbers.values()]
        buffers = [*self._buffers, *self._scratch.values(), *self.block.memory]
        buffers += [self._unpacked, self.drawn]
        buffers += [t for work in self._work.values() for t in work]
        return bytes_of(weights), bytes_of(buffers), bytes_of([self.cache])

    def calls(self, size: StepSize) -> list[Call]:
        """The launches of a step of that size."""
        return [self._call(launch, size) for launch in self.memory.launches.launches]

    def _call(self, launch: Launch, size: StepSize) -> Call:
        if launch.name == "copy_slots" and not size.pairs:
            return _nothing
        options = dict(launch.options)
        if launch.name == "build_work":
            options["slots"] = self.memory.slots
        args = [self.resolved(arg, size) for arg in launch.args]
        return partial(getattr(self._functions, launch.name), *args, **options)

    def resolved(self, arg: Any, size: StepSize) -> Any:
        """The tensor that an argument stands for."""
        match arg:
            case Buffer():
                return self.view(arg, size)
            case Columns(buffer, first, width):
                whole = self.view(buffer, size)
                if buffer.kind != "sums":
                    return whole[None, :, first : first + width]
                return whole[:, :, first : first + width]
            case MatrixRef(number):
                return self.matrices[number]
            case VectorRef():
                return self._vectors[arg]
            case Numbers():
                return self._numbers[arg]
            case CacheRef(layer):
                return self.layer(layer)
            case WorkRef():
                return self._work[arg]
            case ScratchRef():
                return self._scratch[arg]
            case UnpackedRef():
                return self.unpacked(arg) if unpacks(size.rows) else None
            case Given(name):
                return self._given(name, size)
        return arg

    def view(self, buffer: Buffer, size: StepSize) -> torch.Tensor:
        """A buffer with the rows of a step."""
        rows = size.selected if buffer.selected else size.rows
        shape = array_of(buffer, rows).shape
        flat = self._buffers[self.memory.place[buffer.id]].view(-1)
        count = 1
        for n in shape:
            count *= n
        return flat[:count].view(shape)

    def unpacked(self, ref: UnpackedRef) -> torch.Tensor:
        """Where a matrix of codes becomes one in bf16."""
        n, k = self.memory.shape(ref)
        return self._unpacked[: n * k].view(n, k)

    def layer(self, number: int) -> torch.Tensor:
        """A layer's keys and values `[blocks, 2, heads, 16, head_dim]`."""
        first, last = self.memory.layers[number : number + 2]
        layer = self.memory.launches.program.cache[number]
        shape = (len(self.cache), 2, layer.kv_heads, BLOCK, layer.head_dim)
        return self.cache[:, first:last].view(shape)

    def _given(self, name: str, size: StepSize) -> Any:
        if name == "embeddings":
            return self.block.embeddings
        if name == "select":
            return self.block.select(size.selected)
        if name == "pairs":
            return self.block.pairs(size.pairs)
        if name == "segment_rows":
            return self.block.segment_rows(size.rows)
        rows = self.block.rows(size.rows)
        return rows if name == "rows" else getattr(rows, name)


def _nothing() -> None:
    pass


def bytes_of(tensors: list[torch.Tensor]) -> int:
    """Of their memory."""
    return sum(t.numel() * t.element_size() for t in tensors)
