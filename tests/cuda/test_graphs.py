"""When launch lists are called, captured and replayed, with a recorder in place of CUDA."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from octavo.backends.cuda.graphs import Calls, Graphs, replay_on
from octavo.backends.cuda.inputs import StepSize


def test_sizes_are_called_captured_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    pools = []

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def capturing(graph: Graph, pool: object) -> Any:
        pools.append(pool)
        log.append("capture")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph, raising=False)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: object())
    graphs = Graphs()
    one, two = StepSize(1, 1, 0), StepSize(8, 1, 0)
    calls = [lambda: log.append("a"), lambda: log.append("b")]
    for size, expected in (
        (one, "a b"), (one, "capture a b replay"), (one, "replay"), (two, "a b"), (one, "replay"),
        (two, "capture a b replay"), (two, "replay"),
    ):  # fmt: skip
        log.clear()
        graphs.run(size, calls)
        assert " ".join(log) == expected
    assert len(pools) == 2 and pools[0] is pools[1]


def test_the_cpu_calls() -> None:
    assert isinstance(replay_on(torch.device("cpu")), Calls)
    assert isinstance(replay_on(torch.device("cuda", 0)), Graphs)
