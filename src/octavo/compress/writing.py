"""Tensors of a new model, made of those of another when their turn to be written comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from octavo.checkpoint.base import Checkpoint, Tensor, TensorType
from octavo.checkpoint.dequantize import dequantize
from octavo.checkpoint.progress import Advance
from octavo.checkpoint.writer import NewTensor
from octavo.compress import layouts
from octavo.compress.blocks import ENCODED, encode
from octavo.compress.fit import F32
from octavo.compress.grids import check_finite
from octavo.compress.packing import as_floats
from octavo.errors import UsageError


def metadata_of(checkpoint: Checkpoint, file_type: int) -> dict[str, Any]:
    """Metadata of a GGUF file made of another: what says how that one was cut and aligned is left
    out. file_type: as GGUF numbers mixes of types."""
    kept = {
        k: v
        for k, v in checkpoint.metadata.items()
        if not k.startswith(("split.", "general.alignment"))
    }
    return kept | {"general.file_type": file_type, "general.quantization_version": 2}


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
    check_finite(x, kind)
    return as_floats(x, kind)


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


def measured(parts: layouts.Tensors) -> layouts.Tensors:
    """Types and shapes alone."""
    return {ending: replace(part, data=_nothing) for ending, part in parts.items()}


def _nothing() -> Any:
    raise AssertionError("a tensor that is only measured has no data")


@contextmanager
def named(name: str) -> Iterator[None]:
    """What is wrong with a tensor or its inputs, with its name."""
    try:
        yield
    except UsageError as e:
        raise UsageError(f"{name}: {e}", *e.suggestions) from None
