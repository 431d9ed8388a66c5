"""What `octavo tune` has found for a model, kept in the cache folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from octavo.checkpoint import Checkpoint
from octavo.checkpoint.cache import writing
from octavo.checkpoint.hub import cache_folder
from octavo.errors import UsageError


class Tuned(msgspec.Struct, frozen=True):
    """Parts of layers that drafts do without, in self-speculation.

    skip: their numbers, of `parts`. agreement: share of tokens that drafts have right. cost: of a
    token of a draft, in steps. gain: tokens a second against plain steps, as these figures say.
    """

    skip: list[int]
    parts: int
    agreement: float
    cost: float
    gain: float


def tuned_file(checkpoint: Checkpoint) -> Path:
    """Where it is kept for a model in this state (paths, sizes, times)."""
    state = hashlib.sha256(str(checkpoint.path.resolve()).encode())
    for path in sorted(checkpoint.sources):
        s = path.stat()
        state.update(f"{path.resolve()} {s.st_size} {s.st_mtime_ns}\n".encode())
    return cache_folder().parent / "tuned" / f"{state.hexdigest()[:32]}.json"


def write_tuned(checkpoint: Checkpoint, tuned: Tuned) -> Path:
    """Raises CacheError."""
    path = tuned_file(checkpoint)
    with writing(path.parent):
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(tuned))
        part.replace(path)
    return path


def read_tuned(checkpoint: Checkpoint, parts: int | None = None) -> Tuned:
    """parts: how many there are now, if that is known. Raises UsageError if there is nothing, or
    nothing that fits."""
    try:
        tuned = msgspec.json.decode(tuned_file(checkpoint).read_bytes(), type=Tuned)
        if tuned.parts != (tuned.parts if parts is None else parts):
            raise ValueError("of other parts")
        if not all(0 <= part < tuned.parts for part in tuned.skip):
            raise ValueError("no such part")
        return tuned
    except (OSError, ValueError):  # msgspec's errors are among these
        raise UsageError(
            f"--speculation self: which layers of {checkpoint.path.name} drafts do without is not "
            "known yet",
            f"octavo tune {checkpoint.path}",
        ) from None
