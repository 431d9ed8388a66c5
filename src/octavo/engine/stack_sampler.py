"""Samples the Python stack of a thread, for flame graphs.

A thread of this process looks a hundred times a second. Unlike a tool that reads another process
(py-spy), it needs no package and no right to trace, so it works in every container; it sees Python
alone, which is what spans and kernels leave open.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import FrameType

SECONDS = 0.01  # between looks
CLOCKS = "octavo.engine.call_timer"  # which stand around the calls that are timed


class StackSampler:
    """Counts stacks of the thread that makes it, from `start` to `stop`."""

    def __init__(self) -> None:
        self._watched = threading.get_ident()
        self._over = threading.Event()
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._thread = threading.Thread(target=self._look, name="octavo-profile", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> dict[str, int]:
        """How often each stack was seen: frames from the outermost, joined by `;`."""
        self._over.set()
        self._thread.join()
        return {";".join(stack): count for stack, count in self._counts.items()}

    def _look(self) -> None:
        while not self._over.wait(SECONDS):
            self._counts[_stack(sys._current_frames().get(self._watched))] += 1


def _stack(frame: FrameType | None) -> tuple[str, ...]:
    names = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "?")
        if module != CLOCKS:
            names.append(f"{module}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    return tuple(reversed(names))
