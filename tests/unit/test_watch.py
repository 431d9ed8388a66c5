"""When an engine process is judged to have stopped, by looks that say what its state and its work are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest

from octavo.client import watch as watching
from octavo.client.link import EngineLink
from octavo.client.load import known
from octavo.engine.plan import Plan


class Looked:
    """A link of which each look says the next of these: whether it is stopped, and signs of work."""

    def __init__(self, looks: list[tuple[bool, int]]) -> None:
        self._looks: Iterator[tuple[bool, int]] = iter(looks)
        self.taken = 0
        self._stopped = False

    @property
    def signs(self) -> int:
        return self._signs

    @property
    def stopped(self) -> bool:
        return self._stopped

    async def next(self, _: float) -> None:
        self._stopped, self._signs = next(self._looks)
        self.taken += 1


def judged(monkeypatch: pytest.MonkeyPatch, looks: list[tuple[bool, int]]) -> tuple[str, int]:
    """Why the process is killed, after how many looks."""
    link = Looked(looks)
    monkeypatch.setattr(watching.asyncio, "sleep", link.next)
    return asyncio.run(watching.watch(cast(EngineLink, link), lambda: True)), link.taken


def test_a_process_that_is_stopped_is_judged_at_the_second_look(monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    assert judged(monkeypatch, [(False, 1), (True, 1), (True, 1)]) == ("stopped", 3)


def test_one_that_is_slowed_by_stops_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cpulimit does: whenever one looks it is stopped, and has worked."""
    slowed = [(True, i) for i in range(1, 50)]
    assert judged(monkeypatch, [*slowed, (True, 49), (True, 49)]) == ("stopped", 51)


def test_one_that_computes_nothing_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [(False, 1)] * (watching.STUCK + 1)
    assert judged(monkeypatch, looks) == ("stuck", watching.STUCK + 1)


class Given:
    """What of a plan is looked at."""

    class limits:
        blocks = 10

    cache, draft = 1000, None


@pytest.mark.parametrize("stats, waiting", [({}, 3), ({"running": 2, "waiting": 0}, 1), ({"running": 9, "waiting": 4}, 4)])  # fmt: skip
def test_requests_that_an_engine_has_not_counted_wait(stats: dict[str, int], waiting: int) -> None:
    found = known(stats | {"blocks_reached": 4}, 3, cast(Plan, cast(Any, Given)), 1)
    assert found["waiting"] == waiting
    assert (found["kv_bytes"], found["restarts"]) == (400, 1)
