"""Where the packed weights of a model are kept for its next start."""

from __future__ import annotations

import hashlib
from pathlib import Path

from octavo import __version__, _native
from octavo.checkpoint import Checkpoint
from octavo.checkpoint.hub import cache_folder


def packed_file(checkpoint: Checkpoint) -> Path:
    """A file for this model in this state (paths, sizes, times) and this version of the layout."""
    where = _where(checkpoint.path)
    state = hashlib.sha256(f"{__version__} {_native.LAYOUT_VERSION}".encode())
    for path in checkpoint.sources:
        s = path.stat()
        state.update(f"{path.resolve()} {s.st_size} {s.st_mtime_ns}\n".encode())
    return cache_folder().parent / "packed" / f"{where}-{state.hexdigest()[:16]}.weights"


def packed_below(folder: Path) -> list[Path]:
    """Files with the packed weights of models that lie in a folder, in whatever state they were."""
    places = {_where(path) for path in (folder, *folder.rglob("*"))}
    kept = (cache_folder().parent / "packed").glob("*.weights")
    return [file for file in kept if file.name.partition("-")[0] in places]


def _where(model: Path) -> str:
    return hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:16]
