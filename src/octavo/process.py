"""Starting Python again: the one way to a command line for a child process."""

from __future__ import annotations

import sys


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a module in this interpreter.

    -P: `python -m` would import from the current folder first, and whoever filled that folder would
    choose what runs. PYTHONPATH counts as before.
    """
    return [sys.executable, "-P", "-m", module, *arguments]
