"""Tensors of a new model, made of those of another when their turn to be written comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.checkpoint.base import Tensor, TensorType
from octavo.checkpoint.dequantize import dequantize
from octavo.checkpoint.progress import Advance
from octavo.checkpoint.writer import NewTensor
from octavo.compress import layouts
from octavo.compress.blocks import ENCODED, encode
from octavo.compress.fit import F32
from octavo.compress.grids import check_finite, rounded
from octavo.errors import UsageError

_WRITTEN = {"config.json", "model.safetensors.index.json", "quantize_config.json"}
_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".onnx", ".h5", ".msgpack", ".ot")
LARGEST_COPY = 64 << 20  # bytes: tokenizers are smaller, forgotten weights are not


def beside(folder: Path) -> dict[str, Path]:
    """What lies in a model's folder and the folders in it but its weights: tokenizer, template,
    pooling."""
    out = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        wanted = path.is_file() and path.suffix not in _WEIGHTS and str(name) not in _WRITTEN
        if path.suffix == ".safetensors" and len(name.parts) > 1:
            wanted = path.is_file()  # a module's own, such as a Dense layer's
        if wanted and not hidden and path.stat().st_size <= LARGEST_COPY:
            out[str(name)] = path
    return out


def copied(tensor: Tensor, progress: Advance) -> NewTensor:
    """The stored bytes."""

    def read() -> Any:
        progress(tensor.nbytes)
        return tensor.raw()

    return NewTensor(tensor.type, tensor.shape, read)


def converted(
    tensor: Tensor, kind: TensorType, progress: Advance, importance: F32 | None = None
) -> NewTensor:
    """The same numbers in another type. importance: of columns, or of each part's `[parts,
    columns]`."""

    def read() -> Any:
        progress(tensor.nbytes)
        if tensor.type is kind:
            return tensor.raw()
        with named(tensor.name):
            return encoded(dequantize(tensor), kind, importance)

    return NewTensor(kind, tensor.shape, read)


def encoded(x: F32, kind: TensorType, importance: F32 | None = None) -> Any:
    """Numbers as a type stores them. Raises UsageError for those that are not finite."""
    if kind in ENCODED:
        if importance is not None and importance.ndim == 2:
            return np.stack([encode(a, kind, b) for a, b in zip(x, importance, strict=True)])
        return encode(x.reshape(-1, x.shape[-1]), kind, importance)
    check_finite(x)
    if kind is TensorType.BF16:
        return (rounded(x, "bf16").view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(np.float16) if kind is TensorType.F16 else np.asarray(x, np.float32)


def module(parts: layouts.Tensors, make: Callable[[], layouts.Tensors]) -> dict[str, NewTensor]:
    """Tensors that are made together when the first is asked for, each let go of once it is read.

    parts: their types and shapes."""
    made: dict[str, NewTensor] = {}
    begun = False

    def reader(ending: str) -> Callable[[], Any]:
        def read() -> Any:
            nonlocal begun
            if not begun:
                begun = True
                made.update(make())
            return made.pop(ending).data()

        return read

    return {ending: replace(part, data=reader(ending)) for ending, part in parts.items()}


@contextmanager
def named(name: str) -> Iterator[None]:
    """What is wrong with a tensor or its inputs, with its name."""
    try:
        yield
    except UsageError as e:
        raise UsageError(f"{name}: {e}", *e.suggestions) from None
