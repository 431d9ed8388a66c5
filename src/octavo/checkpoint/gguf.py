"""GGUF versions 2 and 3: header, key-values and tensor table, read from a mapped file.

Every count, length and offset is checked against the bytes that are left before anything of that
size is made. Format: ggml's gguf.md; sharded files are named `-00001-of-0000N.gguf`.
"""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path
from typing import Any

from octavo.checkpoint.base import Checkpoint, Stored, Tensor, TensorType, tensor_bytes
from octavo.checkpoint.files import map_file
from octavo.errors import CheckpointError, Unsupported

MAX_DIMENSIONS = 4
READABLE = frozenset(TensorType) - {kind for kind in TensorType if kind >= 1000}
MAX_ARRAY_DEPTH = 2
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_SHARD = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")


class _Reader:
    """A cursor over the mapped file that refuses to pass its end."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data, self.name, self.at, self.size = data, name, 0, len(data)

    def fail(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.name}: damaged GGUF file at byte {self.at}: {why}")

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise self.fail(f"{what} needs {count} bytes, {self.size - self.at} are left")

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(size, "a value")
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        self.need(length, "a string")
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
            values = list(struct.unpack_from(f"<{count}{code}", self.data, self.at))
            self.at += count * size
            return values
        self.need(count * 8, f"an array of {count}")  # a string or an array takes at least 8 bytes
        if kind == _STRING:
            return self.strings(count)
        return [self.value(kind, depth) for _ in range(count)]

    def strings(self, count: int) -> list[str]:
        # The vocabulary: by far the longest array, so the loop is flat.
        data, at, size, unpack = self.data, self.at, self.size, struct.Struct("<Q").unpack_from
        out = []
        try:
            for _ in range(count):
                (length,) = unpack(data, at)
                end = at + 8 + length
                if end > size:
                    raise self.fail(f"a string of {length} bytes passes the end of the file")
                out.append(data[at + 8 : end].decode("utf-8"))
                at = end
        except (struct.error, UnicodeDecodeError):
            raise self.fail("a string array is cut short or not UTF-8") from None
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
    kind, offset = r.scalar("I"), r.scalar("Q")
    if kind not in READABLE:
        raise Unsupported(
            f"{r.name}: tensor {name[:64]!r} has type {kind}, which Octavo does not read",
            "use a file quantized as Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, F16 or BF16",
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
