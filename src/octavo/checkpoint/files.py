"""Reading a model's files: regular ones only, of bounded size, with typed errors.

A folder may hold anything under these names. A FIFO would wait for its writer for ever, a device
may never end, and a few bytes of JSON can become gigabytes of objects.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError

MAX_JSON = 64 << 20
MAX_VALUES = 4 << 20  # in one JSON document; the largest index of a model has a tenth
MAX_DIGITS = 64
_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """A file that is nowhere on disk: its name and what makes its bytes."""

    name: str
    make: Callable[[], bytes]


def open_regular(path: Path) -> int:
    """Opens a regular file and returns its descriptor, without blocking. Raises CheckpointError."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else e
        raise CheckpointError(f"{path.name[:80]}: cannot be read: {reason}") from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise CheckpointError(f"{path.name[:80]}: {kind}, not a regular file")
    return handle


def map_file(path: Path) -> mmap.mmap:
    """A file mapped for reading. Raises CheckpointError."""
    handle = open_regular(path)
    try:
        return mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path.name}: the file is empty") from None
    except OSError as e:
        raise CheckpointError(f"{path.name}: cannot be read: {e.strerror}") from None
    finally:
        os.close(handle)


def read_file(path: Path | MemoryFile, limit: int) -> bytes:
    """All of a file of at most `limit` bytes. Raises CheckpointError."""
    if isinstance(path, MemoryFile):
        return path.make()
    with os.fdopen(open_regular(path), "rb") as f:
        try:
            size = os.fstat(f.fileno()).st_size
            if size > limit:
                raise CheckpointError(f"{path.name}: {size} bytes; at most {limit} are read")
            return f.read(size)
        except OSError as e:
            raise CheckpointError(f"{path.name}: cannot be read: {e.strerror}") from None


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError
    return int(digits)


def check_size(data: bytes, what: str) -> None:
    """Raises CheckpointError for JSON with too many values."""
    values = sum(data.count(c) for c in (b",", b"[", b"{"))
    if values > MAX_VALUES:
        raise CheckpointError(f"{what}: {values} values; at most {MAX_VALUES} are read")


def parse_json(data: bytes, what: str) -> Any:
    """Parses JSON with a limit on the number of values. Raises CheckpointError."""
    check_size(data, what)
    try:
        value = json.loads(data, parse_int=_integer)
        if b"\\u" in data:  # half a character, which no text can hold
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError):
        raise CheckpointError(f"{what}: not valid JSON") from None


def read_json(path: Path | MemoryFile, limit: int = MAX_JSON) -> dict[str, Any]:
    """A JSON object from a file of bounded size. Raises CheckpointError."""
    value = parse_json(read_file(path, limit), path.name)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name}: not a JSON object")
    return value


def read_json_list(path: Path, limit: int = MAX_JSON) -> list[Any]:
    """A JSON list from a file of bounded size. Raises CheckpointError."""
    value = parse_json(read_file(path, limit), path.name)
    if not isinstance(value, list):
        raise CheckpointError(f"{path.name}: not a JSON list")
    return value


def list_folder(folder: Path) -> dict[str, Path]:
    """Paths of a folder's entries, by name. Raises CheckpointError."""
    try:
        return {p.name: p for p in sorted(folder.iterdir())}
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else e
        raise CheckpointError(f"{folder.name[:80]}: cannot be read: {reason}") from None
