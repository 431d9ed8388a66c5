"""How callers are told what long work has done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from octavo.checkpoint.base import Checkpoint

Advance = Callable[[int], None]  # told the bytes of each piece once it is done
ProgressBar = Callable[[str, int], AbstractContextManager[Advance]]  # (what, bytes in all)


def dropping_pages(checkpoint: Checkpoint, progress: Advance) -> Advance:
    """`progress`, which also gives back the pages of a checkpoint that were read by then."""

    def advance(count: int) -> None:
        checkpoint.drop_pages()
        progress(count)

    return advance
