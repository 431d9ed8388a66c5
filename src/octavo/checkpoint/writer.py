"""Writes checkpoints: safetensors folders and GGUF files, a tensor at a time.

A file appears under its name only when it is whole: what is being written lies beside it as
`.NAME.octavo-part`, which one run at a time has, and whatever prevents its end removes that and
leaves an older file as it was.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import TensorType, tensor_bytes
from octavo.checkpoint.files import MemoryFile
from octavo.checkpoint.places import check_new, check_new_file, held, part_of
from octavo.errors import CheckpointError, WriteError

SHARD_BYTES = 5 << 30  # of tensors in one safetensors file
ALIGNMENT = 32  # of tensors in GGUF files
INDEX = "model.safetensors.index.json"
_NAMES = {
    TensorType.F32: "F32", TensorType.F16: "F16", TensorType.BF16: "BF16", TensorType.I8: "I8",
    TensorType.U8: "U8", TensorType.I32: "I32", TensorType.U32: "U32", TensorType.I64: "I64",
    TensorType.FP8_E4M3: "F8_E4M3",
}  # fmt: skip
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64, _I64 = 4, 5, 6, 7, 8, 9, 10, 11
_CODES = {_U32: "<I", _I32: "<i", _F32: "<f", _BOOL: "<?", _U64: "<Q", _I64: "<q"}


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to write. shape: row-major. data: its bytes, made when their turn comes."""

    type: TensorType
    shape: tuple[int, ...]
    data: Callable[[], npt.NDArray[Any]]

    @classmethod
    def of(cls, array: npt.NDArray[Any], kind: TensorType) -> NewTensor:
        """An array that is there already; block formats give their bytes, `[rows, bytes]`."""
        elements, size = kind.block
        shape = array.shape
        if elements > 1:
            shape = (*shape[:-1], shape[-1] // size * elements)
        return cls(kind, shape, lambda: array)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` once it is whole. Raises WriteError."""
    try:
        with held(part_of(path), path) as part, part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)
    except OSError as e:
        why = e.strerror or str(e)
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            why += f" ({shutil.disk_usage(path.parent).free / 1e6:,.0f} MB are free)"
        raise WriteError(f"cannot write {path}: {why}") from None


def _write(file: IO[bytes], name: str, tensor: NewTensor) -> int:
    """Writes the bytes of one tensor, and gives their number."""
    raw = np.ascontiguousarray(tensor.data())
    expected = tensor_bytes(tensor.type, tensor.shape, name)
    if raw.nbytes != expected:
        raise CheckpointError(f"tensor {name!r} has {raw.nbytes} bytes, its shape {expected}")
    file.write(raw.reshape(-1).view(np.uint8).data)
    return expected


# -- safetensors ------------------------------------------------------------------------------


def write_safetensors(
    path: Path, tensors: Mapping[str, NewTensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes one safetensors file. Raises WriteError or CheckpointError."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    at = 0
    for name, tensor in tensors.items():
        if tensor.type not in _NAMES:
            raise CheckpointError(f"tensor {name!r} is {tensor.type.name}, not of safetensors")
        end = at + tensor_bytes(tensor.type, tensor.shape, name)
        entry = {"dtype": _NAMES[tensor.type], "shape": tensor.shape, "data_offsets": (at, end)}
        header[name], at = entry, end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            _write(file, name, tensor)


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, NewTensor],
    files: Mapping[str, Path | MemoryFile] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a Hugging Face folder: config.json, weights in shards of at most `shard_bytes` (one
    tensor may be larger), and copies of `files` (tokenizer, template, ...) by their paths in it.

    The folder appears under its name when it is whole. Raises what `check_new` does, WriteError and
    CheckpointError.
    """
    check_new(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with held(part_of(folder), folder, folder=True) as part:
            _fill(part, config, tensors, files or {}, shard_bytes)
            part.replace(folder)
    except OSError as e:
        raise WriteError(f"cannot write {folder}: {e.strerror or e}") from None


def _fill(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, NewTensor],
    files: Mapping[str, Path | MemoryFile], shard_bytes: int,
) -> None:  # fmt: skip
    shards = _shards(tensors, shard_bytes)
    count = len(shards)
    names = [
        "model.safetensors" if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors"
        for i in range(1, count + 1)
    ]
    for file_name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / file_name, shard)
    if count > 1:
        where = {t: name for name, shard in zip(names, shards, strict=True) for t in shard}
        total = sum(tensor_bytes(t.type, t.shape, n) for n, t in tensors.items())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    for name, source in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, MemoryFile):
            (folder / name).write_bytes(source.make())
        else:
            shutil.copyfile(source, folder / name)
    write_json(folder / "config.json", config)


def write_json(path: Path, value: object) -> None:
    """Writes a JSON document. Raises WriteError."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")


def _shards(tensors: Mapping[str, NewTensor], most: int) -> list[dict[str, NewTensor]]:
    shards: list[dict[str, NewTensor]] = [{}]
    held = 0
    for name, tensor in tensors.items():
        size = tensor_bytes(tensor.type, tensor.shape, name)
        if shards[-1] and held + size > most:
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        held += size
    return shards


# -- GGUF -------------------------------------------------------------------------------------


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, NewTensor]) -> None:
    """Writes a GGUF version 3 file.

    metadata: strings, numbers, truth values, and lists of one of these; whole numbers become u32 if
    they fit, as llama.cpp reads them, lists of them i32. Raises what `check_new_file` does,
    WriteError and CheckpointError.
    """
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        head += _text(key) + _value(key, value)
    offset = 0
    for name, tensor in tensors.items():
        if not tensor.shape or len(tensor.shape) > 4 or tensor.type >= 1000:
            raise CheckpointError(
                f"tensor {name!r}: {tensor.type.name} {list(tensor.shape)} cannot be in a GGUF file"
            )
        head += _text(name) + struct.pack("<I", len(tensor.shape))
        head += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        head += struct.pack("<IQ", int(tensor.type), offset)
        size = tensor_bytes(tensor.type, tensor.shape, name)
        offset += size + -size % ALIGNMENT
    check_new_file(path)
    with suppress(OSError):  # said by what comes next
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(head + bytes(-len(head) % ALIGNMENT))
        for name, tensor in tensors.items():
            size = _write(file, name, tensor)
            file.write(bytes(-size % ALIGNMENT))


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _kind(key: str, values: Sequence[Any], alone: bool) -> int:
    """The GGUF type of values of one kind. Raises CheckpointError for others."""
    kinds = set(map(type, values))
    if kinds <= {bool}:
        return _BOOL
    if kinds <= {int}:
        low, high = min(values, default=0), max(values, default=0)
        if alone and 0 <= low and high < 1 << 32:
            return _U32
        if -(1 << 31) <= low and high < 1 << 31:
            return _I32
        return _U64 if low >= 0 else _I64
    if kinds <= {int, float}:
        return _F32
    if kinds <= {str}:
        return _STRING
    raise CheckpointError(f"{key}: a GGUF file holds no {' and '.join(k.__name__ for k in kinds)}")


def _value(key: str, value: Any) -> bytes:
    if not isinstance(value, list | tuple):
        kind = _kind(key, [value], True)
        return struct.pack("<I", kind) + _scalar(kind, value)
    kind = _kind(key, value, False)
    head = struct.pack("<IIQ", _ARRAY, kind, len(value))
    return head + b"".join(_scalar(kind, v) for v in value)


def _scalar(kind: int, value: Any) -> bytes:
    return _text(value) if kind == _STRING else struct.pack(_CODES[kind], value)
