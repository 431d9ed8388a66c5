"""Launch lists, replayed: as a CUDA graph on a GPU, as calls elsewhere.

A list depends on the padded sizes of a step alone (`inputs.StepSize`), never on lengths: arguments
are views of memory that stays where it is, and what a step is about lies in it. A size is computed
by calls the first time, which compiles its kernels, and captured the second time. All graphs share
one pool; capturing allocates nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from octavo.backends.cuda.inputs import StepSize

Call = Callable[[], None]


class Replaying(Protocol):
    """Runs launch lists."""

    def run(self, size: StepSize, calls: list[Call]) -> None:
        """Computes all launches of a size."""
        ...


class Calls:
    """Every launch is a call."""

    def run(self, size: StepSize, calls: list[Call]) -> None:
        for call in calls:
            call()


class Graphs:
    """A CUDA graph for each size, captured when it is seen again."""

    def __init__(self) -> None:
        self._seen: set[StepSize] = set()
        self._graphs: dict[StepSize, Any] = {}
        self._pool: Any = None

    def run(self, size: StepSize, calls: list[Call]) -> None:
        if size in self._graphs:
            self._graphs[size].replay()
        elif size not in self._seen:
            self._seen.add(size)
            Calls().run(size, calls)
        else:
            self._graphs[size] = self._captured(calls)
            self._graphs[size].replay()

    def _captured(self, calls: list[Call]) -> Any:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            for call in calls:
                call()
        return graph


def replay_on(device: torch.device) -> Replaying:
    """What runs launch lists on a device."""
    return Graphs() if device.type == "cuda" else Calls()
