"""Path to checkpoint, whatever lies there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.gguf import open_gguf
from octavo.checkpoint.identity import file_states
from octavo.checkpoint.safetensors import open_folder
from octavo.errors import ModelNotFound


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a `.gguf` file or a Hugging Face folder. Raises ModelNotFound or CheckpointError."""
    around = path.iterdir() if path.is_dir() else (path, *path.parent.glob("*.gguf"))
    before = file_states(around)
    checkpoint = _open(path)
    opened = (*checkpoint.sources, *checkpoint.files.values())
    return replace(checkpoint, states={str(p): before[str(p)] for p in opened if str(p) in before})


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if not (path / "config.json").exists() and len(ggufs) == 1:
            return open_gguf(ggufs[0])
        return open_folder(path)
    if not path.is_file():
        raise ModelNotFound(f"no file or folder {str(path)!r}")
    return open_gguf(path)
