"""Opens a model file or folder of any supported format."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.files import list_folder
from octavo.checkpoint.folders import gguf_models
from octavo.checkpoint.gguf import open_gguf
from octavo.checkpoint.identity import file_states
from octavo.checkpoint.safetensors import open_folder
from octavo.errors import ModelNotFound


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a `.gguf` file or a Hugging Face folder. Raises ModelNotFound or CheckpointError."""
    folder = os.path.isdir(path)  # unlike Path's, it has no errors of its own
    around = list_folder(path).values() if folder else (path, *path.parent.glob("*.gguf"))
    before = file_states(around)
    checkpoint = _open(path)
    opened = (*checkpoint.sources, *checkpoint.files.values())
    return replace(checkpoint, states={str(p): before[str(p)] for p in opened if str(p) in before})


def _open(path: Path) -> Checkpoint:
    if os.path.isdir(path):
        files = list_folder(path)
        ggufs = gguf_models(files)
        if "config.json" not in files and len(ggufs) == 1:
            return open_gguf(files[ggufs[0]])
        return open_folder(path)
    if not os.path.isfile(path):
        raise ModelNotFound(f"no file or folder {str(path)[:200]!r}")
    return open_gguf(path)
