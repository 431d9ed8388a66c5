"""Path to checkpoint, whatever lies there."""

from __future__ import annotations

import os
from pathlib import Path

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.files import list_folder
from octavo.checkpoint.gguf import open_gguf
from octavo.checkpoint.safetensors import open_folder
from octavo.errors import ModelNotFound


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a `.gguf` file or a Hugging Face folder. Raises ModelNotFound or CheckpointError."""
    if os.path.isdir(path):  # unlike Path's, it has no errors of its own
        files = list_folder(path)
        ggufs = [p for name, p in files.items() if name.endswith(".gguf")]
        if "config.json" not in files and len(ggufs) == 1:
            return open_gguf(ggufs[0])
        return open_folder(path)
    if not os.path.isfile(path):
        raise ModelNotFound(f"no file or folder {str(path)[:200]!r}")
    return open_gguf(path)
