"""How fast a model loads, beside what reading its files from the page cache takes at least.

A loader fills new memory, so there are two limits: the files copied again and again into one small
buffer, and the files copied into as much new memory as the model has.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.checkpoint import open_checkpoint
from octavo.engine.host import usable_threads
from octavo.engine.loader import load_executable
from octavo.engine.open import open_model
from octavo.engine.plan import make_plan
from octavo.process import python_module

READ_BYTES = 1 << 20
SHORT = 256  # context: the KV cache is not what is measured


@dataclass(frozen=True)
class LoadTime:
    """Seconds; medians. nbytes: of the files. packing: from when steps can be computed to when all
    weights are packed. peak, planned: bytes of the loading process, without the KV cache, which is
    not touched."""

    nbytes: int
    buffer_seconds: float
    memory_seconds: float
    load_seconds: float
    packing_seconds: float
    packed_seconds: float
    peak: int
    planned: int


def _parallel(threads: int, work: Callable[[int], None]) -> float:
    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    began = time.perf_counter()
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    return time.perf_counter() - began


def _copy(files: tuple[Path, ...], threads: int, fresh: bool) -> float:
    """Every thread reads its share of every file: to a buffer of its own, or to new memory."""
    sizes = [f.stat().st_size for f in files]
    target = mmap.mmap(-1, sum(sizes)) if fresh else None
    if target is not None:
        target.madvise(mmap.MADV_HUGEPAGE)

    def work(thread: int) -> None:
        base = 0
        for path, size in zip(files, sizes, strict=True):
            begin, end = size * thread // threads, size * (thread + 1) // threads
            view = memoryview(bytearray(READ_BYTES)) if target is None else memoryview(target)
            with path.open("rb", buffering=0) as f:
                f.seek(begin)
                while begin < end:
                    at = 0 if target is None else base + begin
                    count = f.readinto(view[at : at + min(READ_BYTES, end - begin)])
                    begin += count or end
            view.release()
            base += size

    seconds = _parallel(threads, work)
    if target is not None:
        target.close()
    return seconds


def _load(path: Path, threads: int, packed: bool, cache: str) -> tuple[float, float, int, int]:
    """Loads in a process of its own, so that its peak is the loader's."""
    command = python_module(__name__, str(path), str(threads), str(int(packed)))
    environment = os.environ | {"OCTAVO_CACHE": cache}
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    seconds, packing, peak, planned = json.loads(result.stdout)
    return seconds, packing, peak, planned


def _child(path: str, threads: str, packed: str) -> None:
    began = time.perf_counter()
    model = open_model(Path(path))
    plan = make_plan(
        model.compiled, name=path, context=SHORT, threads=int(threads), packed=packed == "1"
    )
    executable = load_executable(model, plan)
    loaded = time.perf_counter()
    while executable.pack_pending():
        pass
    packed_at = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    planned = plan.weights + plan.buffers + plan.process
    print(json.dumps([loaded - began, packed_at - loaded, peak, planned]))


def bench_load(path: Path, repeats: int, threads: int | None) -> LoadTime:
    """Interleaved runs, after one that fills the page cache and writes the packed weights."""
    files, threads = open_checkpoint(path).sources, threads or usable_threads()
    _copy(files, threads, False)
    buffer, fresh, loads, packings, packed = [], [], [], [], []
    peak = planned = 0
    with tempfile.TemporaryDirectory() as cache:
        _load(path, threads, True, cache)
        for _ in range(repeats):
            buffer.append(_copy(files, threads, False))
            fresh.append(_copy(files, threads, True))
            seconds, packing, most, planned = _load(path, threads, False, cache)
            loads.append(seconds)
            packings.append(packing)
            peak = max(peak, most)
            packed.append(_load(path, threads, True, cache)[0])
    return LoadTime(
        nbytes=sum(f.stat().st_size for f in files),
        buffer_seconds=statistics.median(buffer),
        memory_seconds=statistics.median(fresh),
        load_seconds=statistics.median(loads),
        packing_seconds=statistics.median(packings),
        packed_seconds=statistics.median(packed),
        peak=peak,
        planned=planned,
    )


if __name__ == "__main__":
    _child(*sys.argv[1:])
