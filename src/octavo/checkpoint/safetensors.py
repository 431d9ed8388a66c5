"""safetensors files and Hugging Face folders.

Format: u64 header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

from octavo.checkpoint.base import Checkpoint, Stored, TensorType, tensor_bytes
from octavo.checkpoint.quantized import import_quantized
from octavo.errors import CheckpointError, ModelNotFound, Unsupported

MAX_HEADER = 100 << 20
MAX_JSON = 64 << 20
_UNREAD = {"BOOL", "I16", "U16", "U64", "F64"}  # buffers that no program needs
_TYPES = {
    "F32": TensorType.F32, "F16": TensorType.F16, "BF16": TensorType.BF16, "I8": TensorType.I8,
    "U8": TensorType.U8, "I32": TensorType.I32, "U32": TensorType.U32, "I64": TensorType.I64,
    "F8_E4M3": TensorType.FP8_E4M3, "F8_E8M0": TensorType.U8,
}  # fmt: skip


def read_json(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """A JSON object from a file of bounded size. Raises CheckpointError."""
    try:
        if path.stat().st_size > limit:
            raise CheckpointError(f"{path.name}: {path.stat().st_size} bytes is too large for JSON")
        value = json.loads(path.read_bytes())
    except OSError as e:
        raise CheckpointError(f"{path.name}: cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path.name}: not valid JSON") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name}: not a JSON object")
    return value


def _header(data: mmap.mmap, name: str) -> tuple[dict[str, Any], int]:
    if len(data) < 8:
        raise CheckpointError(f"{name}: {len(data)} bytes is too short for safetensors")
    length = int.from_bytes(data[:8], "little")
    if length > min(MAX_HEADER, len(data) - 8):
        raise CheckpointError(f"{name}: a header of {length} bytes does not fit in {len(data)}")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):
        raise CheckpointError(f"{name}: the safetensors header is not valid JSON") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{name}: the safetensors header is not an object")
    return header, 8 + length


def _is_size(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def _entry(name: str, info: Any, file: str) -> tuple[TensorType, tuple[int, ...], int, int]:
    if not isinstance(info, dict):
        raise CheckpointError(f"{file}: tensor {name[:64]!r} has no description")
    dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    if dtype not in _TYPES:
        raise Unsupported(
            f"{file}: tensor {name[:64]!r} is {str(dtype)[:20]}; {', '.join(_TYPES)} are read"
        )
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_size, shape)):
        raise CheckpointError(f"{file}: tensor {name[:64]!r} has no sound shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise CheckpointError(f"{file}: tensor {name[:64]!r} has no sound offsets")
    return _TYPES[dtype], tuple(shape), offsets[0], offsets[1]


def read_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of one file. Raises CheckpointError for a damaged one."""
    try:
        with path.open("rb") as f:
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path.name}: the file is empty") from None
    except OSError as e:
        raise CheckpointError(f"{path.name}: cannot be read: {e.strerror}") from None
    header, start = _header(data, path.name)
    tensors: dict[str, Stored] = {}
    spans: list[tuple[int, int, str]] = []
    for name, info in header.items():
        if name == "__metadata__":
            continue
        if isinstance(info, dict) and info.get("dtype") in _UNREAD:
            continue
        kind, shape, begin, end = _entry(name, info, path.name)
        size = tensor_bytes(kind, shape, name[:64])
        if end - begin != size or start + end > len(data):
            raise CheckpointError(
                f"{path.name}: tensor {name[:64]!r} claims bytes {begin} to {end} for {size}, "
                f"and the file has {len(data)}"
            )
        spans.append((begin, end, name))
        tensors[name] = Stored(name, kind, shape, data, start + begin)
    spans.sort()
    for (_, end, a), (begin, _, b) in zip(spans, spans[1:], strict=False):
        if begin < end:
            raise CheckpointError(f"{path.name}: tensors {a[:64]!r} and {b[:64]!r} overlap")
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(v, str) for v in mapping.values()):
        raise CheckpointError(f"{index.name}: no weight_map")
    names = sorted(set(mapping.values()))
    for name in names:
        if Path(name).name != name or not (folder / name).exists():
            raise CheckpointError(f"{index.name} names {name[:64]!r}, which is not in the folder")
    return [folder / name for name in names]


def open_folder(folder: Path) -> Checkpoint:
    """Opens a Hugging Face model folder. Raises ModelNotFound, CheckpointError or Unsupported."""
    config = folder / "config.json"
    if not config.exists():
        raise ModelNotFound(f"{folder} has no config.json, so it is not a model folder")
    if not any(folder.glob("*.safetensors")):
        raise ModelNotFound(
            f"{folder} has no .safetensors weights (pickled .bin files are not read)"
        )
    stored: dict[str, Stored] = {}
    sources = tuple(_weight_files(folder))
    for path in sources:
        stored.update(read_safetensors(path))
    files = {p.name: p for p in folder.iterdir() if p.suffix in (".json", ".jinja", ".model")}
    metadata = read_json(config)
    if "quantize_config.json" in files and "quantization_config" not in metadata:
        older = {"quant_method": "gptq"} | read_json(files["quantize_config.json"])
        metadata["quantization_config"] = older
    maps = {id(t.file): t.file for t in stored.values()}
    tensors = import_quantized(stored, metadata)
    return Checkpoint(folder, "hf", metadata, tensors, files, sources, tuple(maps.values()))
