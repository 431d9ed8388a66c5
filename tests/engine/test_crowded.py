"""Decoding where others want the same cores."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.engine.engine import Engine
from octavo.engine.loader import load_executable
from octavo.engine.open import open_model
from octavo.engine.plan import make_plan
from octavo.engine.request import Request, SamplingParams


@pytest.fixture
def crowd() -> Iterator[None]:
    """A busy process a core."""
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in os.sched_getaffinity(0)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


def test_two_threads_are_no_slower_than_one(smollm2: Path, crowd: None) -> None:
    """Members that wait for one that is off its core took four fifths of the speed of a single thread,
    and more where more wanted the cores. Rounds by turns, since what the host has to give changes."""
    engines = []
    for threads in (1, 2):
        opened = open_model(smollm2)
        plan = make_plan(opened.compiled, name="m", memory="600MiB", context=2048, threads=threads)
        executable = load_executable(opened, plan)
        while executable.pack_pending():
            pass
        engines.append(Engine(executable, opened.vocabulary, 2048, frozenset()))
        request = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)
        engines[-1].add(Request(id="0", prompt=[5, 6, 7], params=request))
    ratios = []
    for _ in range(7):
        speeds = []
        for engine in engines:
            began, tokens = time.monotonic(), 0
            while time.monotonic() < began + 1:
                tokens += len(engine.step())
            speeds.append(tokens / (time.monotonic() - began))
        ratios.append(speeds[1] / speeds[0])
    assert statistics.median(ratios) > 0.6, ratios
