"""GGUF versions 2 and 3: header, key-values and tensor table, read from a mapped file.

Every count, length and offset is checked against the bytes that are left before anything of that
size is made, and against what models need: a sparse file has any number of bytes for nothing.
Format: ggml's gguf.md; sharded files are named `-00001-of-0000N.gguf`.
"""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from octavo.checkpoint.base import (
    Checkpoint,
    Stored,
    Tensor,
    TensorType,
    tensor_bytes,
)
from octavo.checkpoint.files import map_file
from octavo.errors import CheckpointError, Unsupported

MAX_DIMENSIONS = 4
READABLE = frozenset(kind for kind in TensorType if kind < 1000)
MAX_ARRAY_DEPTH = 2
MAX_TENSORS = 1 << 17
MAX_PAIRS = 1 << 16
MAX_VALUES = 4 << 20  # in all arrays of a file; the largest vocabularies have 1.3 million
MAX_TEXT = 64 << 20  # bytes in all strings of a file
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
UNREAD_TYPES = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 25: "I16",
    28: "F64", 29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0",
    35: "TQ2_0", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 40: "NVFP4", 41: "Q1_0",
    42: "Q2_0",
}  # fmt: skip
_SHARD = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")


class _Reader:
    """A cursor over the mapped file that refuses to pass its end."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data, self.name, self.at, self.size = data, name, 0, len(data)
        self.values, self.text = MAX_VALUES, MAX_TEXT  # what is left

    def fail(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.name}: damaged GGUF file at byte {self.at}: {why}")

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise self.fail(f"{what} needs {count} bytes, {self.size - self.at} are left")

    def take_values(self, count: int) -> None:
        if count > self.values:
            raise self.fail(f"an array of {count}; all arrays may have {MAX_VALUES} values")
        self.values -= count

    def take_text(self, length: int) -> None:
        if length > self.text:
            raise self.fail(f"strings of more than {MAX_TEXT} bytes")
        self.text -= length

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(size, "a value")
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        self.need(length, "a string")
        self.take_text(length)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail("a string is not UTF-8") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(depth + 1)
        if kind not in _SCALARS:
            raise self.fail(f"unknown value type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self, depth: int) -> list[Any]:
        if depth > MAX_ARRAY_DEPTH:
            raise self.fail("arrays are nested too deeply")
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            size = struct.calcsize("<" + code)
            self.need(count * size, f"an array of {count}")
            self.take_values(count)
            values: list[Any] = np.frombuffer(self.data, f"<{code}", count, self.at).tolist()
            self.at += count * size
            return values
        self.need(count * 8, f"an array of {count}")  # a string or an array takes at least 8 bytes
        self.take_values(count)
        if kind == _STRING:
            return self.strings(count)
        return [self.value(kind, depth) for _ in range(count)]

    def strings(self, count: int) -> list[str]:
        # The vocabulary: by far the longest array, so the loop is flat.
        data, at, size, unpack = self.data, self.at, self.size, struct.Struct("<Q").unpack_from
        limit = at + 8 * count + self.text
        out = []
        try:
            for _ in range(count):
                (length,) = unpack(data, at)
                end = at + 8 + length
                if end > size:
                    raise self.fail(f"a string of {length} bytes passes the end of the file")
                if end > limit:
                    self.take_text(MAX_TEXT + 1)
                out.append(data[at + 8 : end].decode("utf-8"))
                at = end
        except (struct.error, UnicodeDecodeError):
            raise self.fail("a string array is cut short or not UTF-8") from None
        self.take_text(at - self.at - 8 * count)
        self.at = at
        return out


def _read_header(r: _Reader) -> tuple[int, int]:
    r.need(24, "the header")
    if r.data[:4] != b"GGUF":
        raise CheckpointError(f"{r.name}: not a GGUF file (it does not begin with GGUF)")
    r.at = 4
    version = r.scalar("I")
    if version not in (2, 3):
        raise Unsupported(f"{r.name}: GGUF version {version}; versions 2 and 3 are supported")
    tensors, pairs = r.scalar("Q"), r.scalar("Q")
    if tensors * 24 > r.size or pairs * 12 > r.size:
        raise r.fail(f"{tensors} tensors and {pairs} key-values cannot be in {r.size} bytes")
    if tensors > MAX_TENSORS or pairs > MAX_PAIRS:
        raise r.fail(
            f"{tensors} tensors, {pairs} key-values; {MAX_TENSORS} and {MAX_PAIRS} at most"
        )
    return tensors, pairs


def _read_metadata(r: _Reader, pairs: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = r.string()
        if key in metadata:
            raise r.fail(f"key {key[:64]!r} appears twice")
        metadata[key] = r.value(r.scalar("I"))
    return metadata


def _read_tensor(r: _Reader) -> tuple[str, TensorType, tuple[int, ...], int]:
    name = r.string()
    dims = r.scalar("I")
    if not 1 <= dims <= MAX_DIMENSIONS:
        raise r.fail(f"tensor {name[:64]!r} has {dims} dimensions")
    shape = tuple(r.scalar("Q") for _ in range(dims))[::-1]
    if 0 in shape:
        raise r.fail(f"tensor {name[:64]!r} has shape {list(shape)}")
    kind, offset = r.scalar("I"), r.scalar("Q")
    if kind not in READABLE:
        raise Unsupported(
            f"{r.name}: tensor {name[:64]!r} is {UNREAD_TYPES.get(kind, f'of type {kind}')}, "
            "which is not read",
            f"read: {', '.join(sorted(t.name for t in READABLE))}",
            "take the model's Q4_K_M, Q5_K_M, Q6_K or Q8_0 file",
        )
    return name, TensorType(kind), shape, offset


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], mmap.mmap]:
    r = _Reader(map_file(path), path.name)
    count, pairs = _read_header(r)
    metadata = _read_metadata(r, pairs)
    entries = [_read_tensor(r) for _ in range(count)]
    alignment = metadata.get("general.alignment", 32)
    if (
        not isinstance(alignment, int)
        or not 1 <= alignment <= 1 << 20
        or alignment & (alignment - 1)
    ):
        raise r.fail(f"alignment {str(alignment)[:20]} is not a power of two up to 2^20")
    start = (r.at + alignment - 1) // alignment * alignment
    tensors: dict[str, Tensor] = {}
    for name, kind, shape, offset in entries:
        size = tensor_bytes(kind, shape, name[:64])
        if name in tensors:
            raise r.fail(f"tensor {name[:64]!r} appears twice")
        if offset % alignment or start + offset + size > r.size:
            raise CheckpointError(
                f"{path.name}: tensor {name[:64]!r} ends at byte {start + offset + size}, "
                f"but the file has {r.size}: is the download complete?"
            )
        tensors[name] = Stored(name, kind, shape, r.data, start + offset)
    return metadata, tensors, r.data


def _shards(path: Path) -> list[Path]:
    match = _SHARD.match(path.name)
    if not match:
        return [path]
    stem, _, count = match.groups()
    if int(count) == 0:
        raise CheckpointError(f"{path.name}: a model of 0 parts, by its name")
    paths = [path.with_name(f"{stem}-{i:05d}-of-{count}.gguf") for i in range(1, int(count) + 1)]
    for p in paths:
        if not p.exists():
            raise CheckpointError(f"{p.name} is missing: the model has {int(count)} parts")
    return paths


def open_gguf(path: Path) -> Checkpoint:
    """Opens a `.gguf` file, or all parts of a sharded one given any of them.

    Raises CheckpointError for a damaged file, Unsupported for a tensor type Octavo does not read.
    """
    shards = _shards(path)
    parts = [_read_file(p) for p in shards]
    metadata, tensors, _ = parts[0]
    for _, more, _ in parts[1:]:
        if clash := tensors.keys() & more.keys():
            raise CheckpointError(f"{path.name}: tensor {min(clash)!r} is in two parts")
        tensors.update(more)
    return Checkpoint(
        path, "gguf", metadata, tensors, {}, tuple(shards), tuple(p[-1] for p in parts)
    )
