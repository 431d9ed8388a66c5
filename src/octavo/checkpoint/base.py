"""One type for every checkpoint: a table of metadata and a table of tensors that stay on disk."""

from __future__ import annotations

import enum
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError


class TensorType(enum.IntEnum):
    """Storage types, numbered as in GGUF files."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    BF16 = 30

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
    TensorType.Q4_K: (256, 144),
    TensorType.Q5_K: (256, 176),
    TensorType.Q6_K: (256, 210),
}


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
class Tensor:
    """A tensor in a mapped file. `shape` is row-major, outermost first."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    file: mmap.mmap = field(repr=False)
    offset: int

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.type, self.shape, self.name)

    def raw(self) -> npt.NDArray[np.uint8]:
        """The stored bytes, `[nbytes]`, without a copy."""
        return np.frombuffer(self.file, np.uint8, self.nbytes, self.offset)

    def vector(self) -> npt.NDArray[np.float32]:
        """A float tensor as fp32 in its own shape, copied. CheckpointError for block types."""
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


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    metadata: GGUF key-values, or the Hugging Face `config.json`.
    files: for Hugging Face folders, the other JSON files by name (tokenizer.json, ...).
    """

    path: Path
    format: Literal["gguf", "hf"]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    files: Mapping[str, Path] = field(default_factory=dict)

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
