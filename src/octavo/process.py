"""Starting Python again: the one way to a command line for a child process, and to its end."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


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
