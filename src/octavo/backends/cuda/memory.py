"""Every byte that a program takes on the device, named before any of it is allocated.

Buffers are assigned by lifetime over the launches. `load` allocates these arrays and nothing else;
`footprint` adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from octavo.backends.base import BLOCK, Footprint, StepLimits
from octavo.backends.cuda.constants import (
    PAIR_BLOCK,
    PARTIAL_TOKENS,
    SOFTMAX_SLICE,
    SPLIT_TOKENS,
    UNPACKED_TOKENS,
    padded,
    places,
    up,
)
from octavo.backends.cuda.formats import Array, DType
from octavo.backends.cuda.launches import (
    Buffer,
    Numbers,
    ScratchRef,
    UnpackedRef,
    VectorRef,
    WorkRef,
)
from octavo.backends.cuda.lower import Launches

SEGMENT = ("segment_first", "segment_last")  # the keys of a row's segment
ALIGNED = 4  # numbers that arrays of a step's inputs begin at multiples of: 16 bytes
SLOTS = 1024  # slices of attention that wait for others, at most
_TYPES: dict[str, DType] = {
    "stream": "f32", "act": "bf16", "query": "bf16", "sums": "f32", "ids": "i32", "order": "i32",
    "owner": "i32",
}  # fmt: skip
KV_DTYPES = ("bf16",)


def array_of(buffer: Buffer, rows: int) -> Array:
    """The array that a buffer is with so many rows of the step."""
    count, kind = rows * buffer.times, _TYPES[buffer.kind]
    if buffer.kind == "sums":
        return Array(kind, (parts(buffer, rows), rows, buffer.width))
    if buffer.kind in ("order", "owner"):
        room = places(count, buffer.width)
        return Array(kind, (room if buffer.kind == "order" else room // PAIR_BLOCK,))
    return Array(kind, (count, up(buffer.width) if buffer.kind == "act" else buffer.width))


def parts(buffer: Buffer, rows: int) -> int:
    """Sums that a linear layer leaves of so many rows."""
    return buffer.slices if rows <= PARTIAL_TOKENS else 1


def unpacks(rows: int) -> bool:
    """Whether matrices of codes become bf16 before they multiply so many padded rows."""
    return rows >= UNPACKED_TOKENS


def _largest(buffer: Buffer, limit: int) -> Array:
    """The array with room for any number of rows up to a limit."""
    sizes = [limit] if limit <= PARTIAL_TOKENS else [limit, PARTIAL_TOKENS]
    return max((array_of(buffer, rows) for rows in sizes), key=lambda a: a.nbytes)


@dataclass(frozen=True)
class DeviceMemory:
    """What a program with these limits takes. kv: elements of a block in front of each layer's."""

    launches: Launches
    limits: StepLimits

    @property
    def tokens(self) -> int:
        return padded(self.limits.tokens)

    @property
    def selected(self) -> int:
        return padded(self.limits.selected)

    def rows(self, buffer: Buffer) -> int:
        return self.selected if buffer.selected else self.tokens

    @cached_property
    def _assigned(self) -> tuple[dict[int, int], list[Array]]:
        """The place of every buffer, and the places: a place is used again once what it held has
        been read for the last time, by a buffer of the same size and type."""
        last: dict[int, int] = {}
        for i, launch in enumerate(self.launches.launches):
            last.update(dict.fromkeys((b.id for b in launch.buffers), i))
        kept = {b.id for b in self.launches.results.values()}
        free: dict[tuple[Array, int], list[int]] = {}
        place: dict[int, int] = {}
        arrays: list[Array] = []
        for i, launch in enumerate(self.launches.launches):
            touched = dict.fromkeys(launch.buffers)
            for buffer in touched:
                if buffer.id in place:
                    continue
                array = _largest(buffer, self.rows(buffer))
                if spare := free.get((array, buffer.width)):
                    place[buffer.id] = spare.pop()
                else:
                    place[buffer.id] = len(arrays)
                    arrays.append(array)
            for buffer in touched:
                if last[buffer.id] == i and buffer.id not in kept:
                    array = arrays[place[buffer.id]]
                    free.setdefault((array, buffer.width), []).append(place[buffer.id])
        return place, arrays

    @property
    def place(self) -> dict[int, int]:
        """The number of each buffer's array in `buffers`, by the buffer's id."""
        return self._assigned[0]

    @property
    def buffers(self) -> list[Array]:
        return self._assigned[1]

    @cached_property
    def vectors(self) -> dict[VectorRef, Array]:
        found = (a for launch in self.launches.launches for a in launch.args)
        out: dict[VectorRef, Array] = {}
        for ref in found:
            if isinstance(ref, VectorRef):
                lead = (len(ref.weights),) if len(ref.weights) > 1 else ()
                out[ref] = Array("f32", (*lead, *ref.weights[0].tensor.shape))
        return out

    @cached_property
    def numbers(self) -> dict[Numbers, Array]:
        found = (a for launch in self.launches.launches for a in launch.args)
        return {n: Array(n.dtype, (len(n.values),)) for n in found if isinstance(n, Numbers)}

    @cached_property
    def work(self) -> dict[WorkRef, dict[str, Array]]:
        """Work lists: of each row at most a group; a group has an item, or one a slot."""
        found = (a for launch in self.launches.launches for a in launch.args)
        items = self.tokens + self.slots
        arrays = {
            "groups": Array("i32", (self.tokens, 8)),
            "items": Array("i32", (items, 8)),
            "counts": Array("i32", (4,)),
        }
        return {w: arrays for w in found if isinstance(w, WorkRef)}

    @property
    def slots(self) -> int:
        """Slices of attention that can be computed apart."""
        return min(SLOTS, self.tokens * -(-self.table * BLOCK // SOFTMAX_SLICE))

    @cached_property
    def scratch(self) -> dict[ScratchRef, Array]:
        found = (a for launch in self.launches.launches for a in launch.args)
        return {
            s: Array("f32", (self.slots, SPLIT_TOKENS, s.heads, s.head_dim + 2))
            for s in found
            if isinstance(s, ScratchRef)
        }

    @cached_property
    def unpacked(self) -> Array:
        """Room for the largest matrix of codes that multiplies all rows, if they can be many."""
        found = (a for launch in self.launches.launches for a in launch.args)
        sizes = [self.shape(ref) for ref in found if isinstance(ref, UnpackedRef)]
        most = max((n * k for n, k in sizes), default=0)
        return Array("bf16", (most if unpacks(self.tokens) else 0,))

    def shape(self, ref: UnpackedRef) -> tuple[int, int]:
        """Of a matrix in bf16, padded."""
        spec = self.launches.matrices[ref.number]
        return up(spec.n), up(spec.k)

    @property
    def table(self) -> int:
        """Blocks of the longest sequence."""
        return min(self.limits.blocks, -(-self.launches.program.context // BLOCK))

    @cached_property
    def inputs(self) -> dict[str, Array]:
        """What a step sends to the device, int32 but for embeddings, in the order of one block."""
        program, tokens = self.launches.program, self.tokens
        axes = max((i.shape[0] for i in program.inputs if i.name == "coordinates"), default=1)
        names = ["ids", "positions", "types", "given", "table", "key", "first", "last"]
        if any(work.segmented for work in self.work):
            names += SEGMENT
        out = {name: Array("i32", (tokens,)) for name in names}
        out["coordinates"] = Array("i32", (int(axes), tokens))
        out["select"] = Array("i32", (self.selected,))
        out["pairs"] = Array("i32", (tokens, 2))
        out["tables"] = Array("i32", (max(1, tokens * self.table),))
        return out

    @property
    def drawn(self) -> Array:
        """The tokens that a step draws."""
        return Array("i32", (self.selected,))

    @property
    def embeddings(self) -> Array:
        """Rows that a step gives."""
        given = [i.shape[-1] for i in self.launches.program.inputs if i.name == "embeddings"]
        return Array("f32", (self.tokens if given else 0, int(given[0]) if given else 0))

    @cached_property
    def layers(self) -> list[int]:
        """Where each layer begins in a KV block, and the block's elements."""
        out = [0]
        for layer in self.launches.program.cache:
            out.append(out[-1] + 2 * layer.kv_heads * BLOCK * layer.head_dim)
        return out

    @property
    def cache(self) -> Array:
        return Array("bf16", (self.limits.blocks, self.layers[-1]))

    @property
    def footprint(self) -> Footprint:
        weights = sum(spec.nbytes for spec in self.launches.matrices)
        weights += sum(a.nbytes for a in (*self.vectors.values(), *self.numbers.values()))
        buffers = [*self.buffers, *self.scratch.values(), self.unpacked]
        buffers += [self.embeddings, self.drawn]
        buffers += [a for arrays in self.work.values() for a in arrays.values()]
        inputs = sum(up(a.nbytes, 4 * ALIGNED) for a in self.inputs.values())
        return Footprint(weights, inputs + sum(a.nbytes for a in buffers), self.cache.nbytes)
