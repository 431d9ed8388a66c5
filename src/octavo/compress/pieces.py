"""Pieces of a matrix, computed by all threads: numpy lets go of the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from octavo.engine.host import usable_threads

T = TypeVar("T")


def each(rows: int, at_once: int, work: Callable[[slice], T]) -> list[T]:
    """What `work` gives for slices of `at_once` of the rows, in order."""
    pieces: Sequence[slice] = [slice(i, min(i + at_once, rows)) for i in range(0, rows, at_once)]
    threads = min(len(pieces), usable_threads())
    if threads < 2:
        return list(map(work, pieces))
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, pieces))
