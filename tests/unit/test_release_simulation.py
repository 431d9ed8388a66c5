"""Whole releases in simulated time: the sound are promoted, the broken rolled back, and soon."""

from __future__ import annotations

from statistics import median

import pytest
from benchmarks.releases import SPEC, Version, run


def test_the_sound_are_promoted() -> None:
    runs = [run(SPEC, Version(), 1.0, seed) for seed in range(12)]
    assert [r.phase for r in runs] == ["promoted"] * 12
    assert all("no guard against it" in r.reason for r in runs)


@pytest.mark.parametrize(
    ("version", "seconds", "guard"),
    [
        (Version(errors=0.3), 15, "error_rate"),
        (Version(slower=1.2), 500, "itl_mean"),
        (Version(empty=0.3), 40, "empty_rate"),
        (Version(errors=0.3, from_then=240), 240 + 60, "error_rate"),
    ],
)
def test_the_broken_are_rolled_back(version: Version, seconds: float, guard: str) -> None:
    """One request a second of the canary, twenty of all."""
    runs = [run(SPEC, version, 20.0, seed) for seed in range(5)]
    assert {(r.phase, r.reason.partition(" ")[0]) for r in runs} == {("rolled_back", guard)}
    assert version.from_then < min(r.seconds for r in runs)
    assert median(r.seconds for r in runs) < seconds
