"""safetensors files and Hugging Face folders.

Format: u64 header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from octavo.checkpoint.base import Checkpoint, Stored, TensorType, tensor_bytes
from octavo.checkpoint.files import list_folder, map_file, parse_json, read_json
from octavo.checkpoint.quantized import import_quantized
from octavo.errors import CheckpointError, ModelNotFound, Unsupported

MAX_HEADER = 100 << 20
_UNREAD = {"BOOL", "I16", "U16", "U64", "F64"}  # buffers that no program needs
_TYPES = {
    "F32": TensorType.F32, "F16": TensorType.F16, "BF16": TensorType.BF16, "I8": TensorType.I8,
    "U8": TensorType.U8, "I32": TensorType.I32, "U32": TensorType.U32, "I64": TensorType.I64,
    "F8_E4M3": TensorType.FP8_E4M3, "F8_E8M0": TensorType.U8,
}  # fmt: skip


def _header(data: mmap.mmap, name: str) -> tuple[dict[str, Any], int]:
    if len(data) < 8:
        raise CheckpointError(f"{name}: {len(data)} bytes is too short for safetensors")
    length = int.from_bytes(data[:8], "little")
    if length > min(MAX_HEADER, len(data) - 8):
        raise CheckpointError(f"{name}: a header of {length} bytes does not fit in {len(data)}")
    header = parse_json(data[8 : 8 + length], f"{name}: the safetensors header")
    if not isinstance(header, dict):
        raise CheckpointError(f"{name}: the safetensors header is not an object")
    return header, 8 + length


def _is_size(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def _entry(name: str, info: Any, file: str) -> tuple[TensorType, tuple[int, ...], int, int]:
    if not isinstance(info, dict):
        raise CheckpointError(f"{file}: tensor {name[:64]!r} has no description")
    dtype, shape, offsets = str(info.get("dtype")), info.get("shape"), info.get("data_offsets")
    if dtype not in _TYPES:
        raise Unsupported(
            f"{file}: tensor {name[:64]!r} is {dtype[:20]}; {', '.join(_TYPES)} are read"
        )
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_size, shape)):
        raise CheckpointError(f"{file}: tensor {name[:64]!r} has no sound shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise CheckpointError(f"{file}: tensor {name[:64]!r} has no sound offsets")
    return _TYPES[dtype], tuple(shape), offsets[0], offsets[1]


def read_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of one file. Raises CheckpointError for a damaged one."""
    data = map_file(path)
    header, start = _header(data, path.name)
    tensors: dict[str, Stored] = {}
    spans: list[tuple[int, int, str]] = []
    for name, info in header.items():
        if name == "__metadata__":
            continue
        if isinstance(info, dict) and str(info.get("dtype")) in _UNREAD:
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


def _weight_map(folder: Path, names: Collection[str]) -> dict[str, str]:
    """The file of each tensor, as the index says. Other files of the folder are ignored. A whole
    file comes before an index, which may be left of what was there before."""
    index = "model.safetensors.index.json"
    if index not in names or "model.safetensors" in names:
        return {}
    mapping = read_json(folder / index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointError(f"{index}: no weight_map")
    for part in mapping.values():
        if not isinstance(part, str) or part not in names:
            name = str(part)[:64]
            raise CheckpointError(f"{index} names {name!r}, which is not in the folder")
    return mapping


def _check_weights(folder: Path, files: Mapping[str, Path]) -> None:
    """Raises ModelNotFound or Unsupported for a folder whose weights are not under HF's names."""
    if {"model.safetensors", "model.safetensors.index.json"} & files.keys():
        return
    if any(n.startswith("consolidated") and n.endswith(".safetensors") for n in files):
        raise Unsupported(
            f"{folder.name}: consolidated.safetensors, Mistral's own layout   (params.json)",
            "use the repository's model*.safetensors beside it, or convert it with transformers' "
            "convert_mistral_weights_to_hf.py",
        )
    found = sorted(n for n in files if n.endswith((".safetensors", ".bin", ".pth")))
    what = f"{', '.join(found)[:120]}, but " if found else ""
    raise ModelNotFound(
        f"{folder.name} has {what}no model.safetensors (pickled .bin files are not read)"
    )


def open_folder(folder: Path) -> Checkpoint:
    """Opens a Hugging Face model folder. Raises ModelNotFound, CheckpointError or Unsupported."""
    files = list_folder(folder)
    if "config.json" not in files and "params.json" not in files:
        raise ModelNotFound(f"{folder} has no config.json, so it is not a model folder")
    _check_weights(folder, files)
    metadata = read_json(folder / "config.json")
    stored: dict[str, Stored] = {}
    parts = _weight_map(folder, files)
    sources = tuple(folder / n for n in sorted({*parts.values()} or {"model.safetensors"}))
    for path in sources:
        held = read_safetensors(path).items()
        stored |= {n: t for n, t in held if parts.get(n, path.name) == path.name}
    if "quantize_config.json" in files and "quantization_config" not in metadata:
        older = {"quant_method": "gptq"} | read_json(files["quantize_config.json"])
        metadata["quantization_config"] = older
    maps = {id(t.file): t.file for t in stored.values()}
    kept = {n: p for n, p in files.items() if p.suffix in (".json", ".jinja", ".model")}
    imported = import_quantized(stored, metadata)
    return Checkpoint(folder, "hf", metadata, imported, kept, sources, tuple(maps.values()))
