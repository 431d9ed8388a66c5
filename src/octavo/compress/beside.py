"""The files of a model's folder that go along with its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.files import MemoryFile

_WRITTEN = {"config.json", "model.safetensors.index.json", "quantize_config.json", "quality.json"}
_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".onnx", ".h5", ".msgpack", ".ot")
LARGEST_COPY = 64 << 20  # bytes: tokenizers are smaller, forgotten weights are not


def beside(checkpoint: Checkpoint) -> Mapping[str, Path | MemoryFile]:
    """What lies in a model's folder and the folders in it but its weights: tokenizer, template,
    pooling. Of a GGUF file seen as a folder: the files that it would have there."""
    folder = checkpoint.path
    if not folder.is_dir():
        return checkpoint.files
    out: dict[str, Path | MemoryFile] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        wanted = path.is_file() and path.suffix not in _WEIGHTS and str(name) not in _WRITTEN
        if path.suffix == ".safetensors" and len(name.parts) > 1:
            wanted = path.is_file()  # a module's own, such as a Dense layer's
        if wanted and not hidden and path.stat().st_size <= LARGEST_COPY:
            out[str(name)] = path
    return out
