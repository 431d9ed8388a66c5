"""How callers are told what long work has done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

Advance = Callable[[int], None]  # told the bytes of each piece once it is done
ProgressBar = Callable[[str, int], AbstractContextManager[Advance]]  # (what, bytes in all)
