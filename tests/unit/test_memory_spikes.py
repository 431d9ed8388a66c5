"""Spikes of memory of real processes, named by what happened meanwhile."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import pytest

from octavo.cli.diagnosis import _spikes
from octavo.client.base import EngineClient
from octavo.server.exchange import Exchange, Running
from octavo.server.memory_spikes import LEAST, MEMORY_CAUSES, MemorySpike, MemorySpikes
from octavo.server.registry import Registry
from tests.unit.fake_models import ScriptedClient

GROWS = """
import sys
kept = []
for line in sys.stdin:
    kept.append(b"x" * int(line))
    print(flush=True)
"""
BIG = LEAST + (20 << 20)


class Grower:
    """A process that takes memory when it is told."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", GROWS]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.grow(0)

    def grow(self, size: int) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{size}\n".encode())
        self.process.stdin.flush()
        self.process.stdout.readline()

    def close(self) -> None:
        self.process.communicate()


class Watched:
    """A server and an engine, as spikes are looked for in them."""

    def __init__(self, server: Grower, engine: Grower) -> None:
        self.server, self.engine = server, engine
        self.client = ScriptedClient([], pid=engine.process.pid, stats={})
        models = Registry()
        models.add("m", cast(EngineClient, self.client))
        self.running, self.found = Running(), deque[MemorySpike]()
        self.told: list[tuple[str, str]] = []
        self.spikes = MemorySpikes(models, self.running, self.found, lambda *one: self.told.append(one), server.process.pid)  # fmt: skip
        self.spikes.look()


@pytest.fixture
def watched() -> Iterator[Watched]:
    with closing(Grower()) as server, closing(Grower()) as engine:
        yield Watched(server, engine)


@pytest.mark.parametrize(
    ("stats", "cause"),
    [
        ({"kv_bytes": BIG // 2}, "kv_cache"),
        ({"kv_bytes": BIG // 2, "images_encoded": 1}, "kv_cache"),
        ({"kv_bytes": BIG // 8, "images_encoded": 1}, "images"),
        ({"grammars_compiled": 3, "prepared": 9}, "grammars"),
        ({"prepared": 9}, "preparation"),
        ({}, "unknown"),
    ],
)
def test_an_engine_is_named_with_what_took_it(
    watched: Watched, stats: dict[str, int], cause: str
) -> None:
    one: Any = {"exchange": Exchange(id="asked")}
    watched.running["asked"] = [one]
    watched.engine.grow(BIG)
    watched.client.stats |= stats
    watched.spikes.look()
    (spike,) = watched.found
    assert (spike.model, spike.cause, spike.requests) == ("m", cause, ["asked"])
    assert BIG <= spike.bytes < BIG + (8 << 20) and 0 < spike.seconds < 60
    assert watched.told == [("m", cause)]
    watched.spikes.look()
    assert len(watched.found) == 1, "it is told once"


def test_an_adapter_takes_memory(watched: Watched) -> None:
    watched.engine.grow(BIG)
    watched.client.adapters.append("a")
    watched.spikes.look()
    assert watched.told == [("m", "adapters")]


def test_a_server_reads_bodies(watched: Watched) -> None:
    """Of a request that runs, and of one that has ended."""
    one: Any = {"exchange": Exchange(id="big", received=BIG // 6)}
    watched.running["big"] = [one]
    watched.spikes.ended(Exchange(received=BIG // 6))
    watched.server.grow(BIG)
    watched.spikes.look()
    assert [(spike.model, spike.cause) for spike in watched.found] == [("", "bodies")]


def test_what_grows_slowly_or_little_is_no_spike(watched: Watched) -> None:
    for _ in range(20):
        watched.engine.grow(LEAST // 12)
        watched.spikes.look()
    assert watched.found == deque()


def test_an_engine_that_starts_or_has_ended_is_not_looked_at(watched: Watched) -> None:
    watched.client.ready = False
    watched.spikes.look()
    watched.engine.grow(BIG)
    watched.client.ready = True
    watched.spikes.look()
    watched.engine.close()
    watched.spikes.look()
    assert watched.found == deque()


def test_the_doctor_names_what_is_not_known() -> None:
    spike = {"model": "m", "bytes": 200_000_000, "seconds": 3.2, "requests": ["a", "b"]}
    told = [*_spikes([spike | {"cause": cause} for cause in MEMORY_CAUSES])]
    assert [(one.name, one.model, one.meaning) for one in told] == [
        ("memory_spike", "m", "the engine grew by 200 MB within 3 s")
    ]
    assert "(a, b)" in told[0].mitigation
