"""A small model, and models rounded with few tokens of a small vocabulary."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import octavo
from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.base import TensorType
from octavo.checkpoint.dequantize import dequantize
from octavo.checkpoint.writer import NewTensor, write_folder
from octavo.compress.beside import beside
from octavo.compress.folder_view import as_folder
from octavo.compress.jobs import Rounded
from tests.small_models import Small

SMALL = Small(heads=4, kv_heads=2, head_dim=32, hidden=128, ffn=256, layers=2, tied=False)
COMMAND = [sys.executable, "-m", "octavo.cli.main", "quantize"]


def save_changed(source: Path, out: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> Path:
    """A folder of a model with other weights."""
    c = as_folder(open_checkpoint(source))
    tensors = {
        n: NewTensor.of(np.ascontiguousarray(change(n, np.array(dequantize(t)))), TensorType.F32)
        for n, t in c.tensors.items()
    }
    write_folder(out, c.metadata, tensors, beside(c))
    return out


def of_runs(told: list[str]) -> Callable[[str], None]:
    """Takes down what is said of earlier runs."""
    return lambda text: None if text.startswith("layers see") else told.append(text)


def quantized(
    source: Path, recipe: str, out: Path, text: Path, format: str | None = None
) -> Rounded:
    return octavo.quantize(source, recipe=recipe, output=out, data=text, format=format)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }
