"""What a process is to the system: how it starts another, when it ends, how it frees memory."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
M_MMAP_THRESHOLD = -3
LARGE_BLOCK = 1 << 20  # bytes


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a module in this interpreter.

    -P: `python -m` would import from the current folder first, and whoever filled that folder would
    choose what runs. PYTHONPATH counts as before.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def unmap_freed_blocks(least: int = LARGE_BLOCK) -> None:
    """Has the allocator return freed blocks of `least` bytes and more to the system at once.

    glibc raises this bound to the largest block that was freed, at most 32 MiB, and from then on
    each thread's arena may keep twice as much: 64 MiB for every thread that decodes images.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if set_option is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        set_option(M_MMAP_THRESHOLD, least)
