"""The common form of all checkpoints: metadata, and tensors that are read when they are needed."""

from __future__ import annotations

import enum
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.files import MemoryFile
from octavo.checkpoint.identity import FileState
from octavo.errors import CheckpointError


class TensorType(enum.IntEnum):
    """Storage types, numbered as in GGUF files; from 1000 on, those that GGUF does not have.

    INT4 to FP8 are codes with a scale for each group of columns (`checkpoint/grouped.py`).
    """

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    I8 = 24
    I32 = 26
    I64 = 27
    BF16 = 30
    MXFP4 = 39
    U8 = 1000
    U32 = 1001
    FP8_E4M3 = 1002
    INT4 = 1010
    INT4_MIN = 1011
    INT8 = 1012
    INT8_MIN = 1013
    TABLE4 = 1014
    FP8 = 1015

    @property
    def block(self) -> tuple[int, int]:
        """(elements, bytes) of one block."""
        return _BLOCKS[self]


_BLOCKS = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.BF16: (1, 2),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q5_0: (32, 22),
    TensorType.Q5_1: (32, 24),
    TensorType.Q8_0: (32, 34),
    TensorType.IQ4_NL: (32, 18),
    TensorType.MXFP4: (32, 17),
    TensorType.Q2_K: (256, 84),
    TensorType.Q3_K: (256, 110),
    TensorType.Q4_K: (256, 144),
    TensorType.Q5_K: (256, 176),
    TensorType.Q6_K: (256, 210),
    TensorType.I8: (1, 1),
    TensorType.I32: (1, 4),
    TensorType.I64: (1, 8),
    TensorType.U8: (1, 1),
    TensorType.U32: (1, 4),
    TensorType.FP8_E4M3: (1, 1),
}
# Codes with scales apart (grouped.py); what kernels read as it lies; of that, what they multiply
# as integers.
GROUPED = (
    TensorType.INT4, TensorType.INT4_MIN, TensorType.INT8, TensorType.INT8_MIN, TensorType.TABLE4,
    TensorType.FP8,
)  # fmt: skip
FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)
BLOCKS = tuple(k for k, (elements, _) in _BLOCKS.items() if elements > 1)
PACKED = (*BLOCKS, *GROUPED, *FLOATS)
DIGITAL = (*BLOCKS, *GROUPED[:4])
_NUMPY: dict[TensorType, npt.DTypeLike] = {
    TensorType.F32: np.float32, TensorType.F16: np.float16, TensorType.BF16: np.uint16,
    TensorType.I8: np.int8, TensorType.I32: np.int32, TensorType.I64: np.int64,
    TensorType.U8: np.uint8, TensorType.U32: np.uint32, TensorType.FP8_E4M3: np.uint8,
}  # fmt: skip


def tensor_bytes(kind: TensorType, shape: tuple[int, ...], name: str) -> int:
    """Bytes of a tensor, rows of whole blocks. Raises CheckpointError for a ragged row."""
    elements, size = kind.block
    total = 1
    for n in shape:
        total *= n
    if shape and shape[-1] % elements:
        raise CheckpointError(
            f"tensor {name!r}: rows of {shape[-1]} are not whole {kind.name} blocks of {elements}"
        )
    return total // elements * size


@dataclass(frozen=True, slots=True)
class Tensor(ABC):
    """A matrix or vector of a checkpoint. `shape` is row-major, outermost first."""

    name: str
    type: TensorType
    shape: tuple[int, ...]

    @property
    def group(self) -> int:
        """Columns that share a scale, for types with variable group sizes; else 0."""
        return 0

    @property
    def order(self) -> tuple[int, ...] | None:
        """Stored column i belongs to input order[i]. None: the columns are in order."""
        return None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes in the file."""

    @abstractmethod
    def raw(self) -> npt.NDArray[np.uint8]:
        """The tensor's data as the packers read it: rows of elements or blocks."""

    @abstractmethod
    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of a matrix, or elements of a vector."""

    def _cut(self, begin: int, end: int) -> tuple[str, TensorType, tuple[int, ...]]:
        return f"{self.name}[{begin}:{end}]", self.type, (end - begin, *self.shape[1:])

    def part(self, index: int) -> Tensor:
        """The sub-tensor at `index` of the first dimension, such as one expert's matrix."""
        raise CheckpointError(f"tensor {self.name!r} has no parts")

    def vector(self) -> npt.NDArray[np.float32]:
        """A float tensor as fp32 in its own shape, copied. CheckpointError for other types."""
        data = self.raw()
        if self.type is TensorType.F32:
            values = data.view(np.float32).copy()
        elif self.type is TensorType.F16:
            values = data.view(np.float16).astype(np.float32)
        elif self.type is TensorType.BF16:
            values = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            raise CheckpointError(
                f"tensor {self.name!r} is {self.type.name}, expected a float type"
            )
        return values.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Stored(Tensor):
    """A tensor in a memory-mapped file."""

    file: mmap.mmap = field(repr=False)
    offset: int

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.type, self.shape, self.name)

    def raw(self) -> npt.NDArray[np.uint8]:
        """The stored bytes, `[nbytes]`, without a copy."""
        return np.frombuffer(self.file, np.uint8, self.nbytes, self.offset)

    def array(self) -> npt.NDArray[Any]:
        """The data in the tensor's shape, without a copy. bf16 and fp8 are unsigned integers."""
        return self.raw().view(_NUMPY[self.type]).reshape(self.shape)

    def rows(self, begin: int, end: int) -> Stored:
        each = self.nbytes // self.shape[0]
        return Stored(*self._cut(begin, end), self.file, self.offset + begin * each)

    def part(self, index: int) -> Stored:
        each = self.nbytes // self.shape[0]
        name, kind = f"{self.name}[{index}]", self.type
        return Stored(name, kind, self.shape[1:], self.file, self.offset + index * each)


@dataclass(frozen=True, slots=True)
class Computed(Tensor):
    """A tensor computed from others when it is read: `[rows, ...]` of elements or blocks."""

    stored: int
    read: Callable[[], npt.NDArray[Any]] = field(repr=False)

    @classmethod
    def transposed(cls, source: Stored | Computed) -> Computed:
        """A float matrix `[inputs, outputs]` as rows of outputs."""
        read = source.array if isinstance(source, Stored) else source.read
        shape = source.shape[::-1]
        return cls(source.name, source.type, shape, source.nbytes, lambda: read().T)

    @classmethod
    def every(cls, source: Stored | Computed, first: int, step: int) -> Computed:
        """Rows first, first + step, ... of another tensor."""
        read = source.array if isinstance(source, Stored) else source.read
        count = len(range(first, source.shape[0], step))
        shape, name = (count, *source.shape[1:]), f"{source.name}[{first}::{step}]"
        stored = source.nbytes * count // source.shape[0]
        return cls(name, source.type, shape, stored, lambda: read()[first::step])

    @property
    def nbytes(self) -> int:
        return self.stored

    def raw(self) -> npt.NDArray[np.uint8]:
        return np.ascontiguousarray(self.read()).reshape(-1).view(np.uint8)

    def rows(self, begin: int, end: int) -> Computed:
        stored = self.stored * (end - begin) // self.shape[0]
        return Computed(*self._cut(begin, end), stored, lambda: self.read()[begin:end])

    def part(self, index: int) -> Computed:
        stored, shape = self.stored // self.shape[0], self.shape[1:]
        return Computed(
            f"{self.name}[{index}]", self.type, shape, stored, lambda: self.read()[index]
        )


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    metadata: GGUF key-values, or the Hugging Face `config.json`.
    files: for Hugging Face folders, the other JSON files by name (tokenizer.json, ...).
    sources, maps: the files that hold tensors, and as mapped. states: of all these files, as they
    were before they were read. mmproj: the file with a GGUF model's image encoder, whose files are
    among these.
    """

    path: Path
    format: Literal["gguf", "hf"]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    files: Mapping[str, Path | MemoryFile] = field(default_factory=dict)
    sources: tuple[Path, ...] = ()
    maps: tuple[mmap.mmap, ...] = ()
    states: Mapping[str, FileState] = field(default_factory=dict)
    mmproj: Checkpoint | None = None

    @property
    def architecture(self) -> str:
        key = "general.architecture" if self.format == "gguf" else "model_type"
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise CheckpointError(
                f"{self.path.name}: no {key}, so this is not a model Octavo can read"
            )
        return value

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def parameters(self) -> int:
        return sum(math.prod(t.shape) for t in self.tensors.values())

    def drop_pages(self) -> None:
        """Gives back the file pages that were read, which count as this process's memory."""
        for mapped in self.maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """A tensor by name. Raises CheckpointError if it is missing or not of `shape`."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path.name}: tensor {name!r} is missing")
        tensor = self.tensors[name]
        if shape is not None and tensor.shape != shape:
            raise CheckpointError(
                f"{self.path.name}: tensor {name!r} has shape {list(tensor.shape)}, "
                f"expected {list(shape)}"
            )
        return tensor
