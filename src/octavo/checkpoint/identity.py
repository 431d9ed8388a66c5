"""Detects changes of a model's files between two reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from octavo.errors import ModelChanged, ModelNotFound

FileState = tuple[int, int, int, int]  # device, inode, bytes, nanoseconds of the last change


def file_states(paths: Iterable[Path]) -> dict[str, FileState]:
    """The states of those paths that exist, by path."""
    out = {}
    for path in paths:
        try:
            s = path.stat()
        except (OSError, ValueError):  # the second: a zero byte in a name
            continue
        out[str(path)] = (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns)
    return out


def check_unchanged(known: Mapping[str, FileState]) -> None:
    """Raises ModelNotFound or ModelChanged, naming the first file that is gone or different."""
    now = file_states(map(Path, known))
    for path, state in known.items():
        if path not in now:
            raise ModelNotFound(f"{Path(path).name} is gone")
        if now[path] != state:
            raise ModelChanged(f"{Path(path).name} has changed since it was read")
