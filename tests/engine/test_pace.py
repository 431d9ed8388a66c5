"""What others feel of a flood, a long prompt or a class above theirs: steps that take virtual time."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest

from octavo.backends.base import Sample, StepInput
from octavo.engine.engine import Engine
from octavo.engine.events import Progress, Token, ends
from octavo.engine.pace import EVEN, LEAST, OTHERS, OWN, Pace, StepBudget
from octavo.engine.policy import FairPolicy
from octavo.engine.request import Request, SamplingParams
from tests.engine.test_engine import Clock, Counting, engine

SMALL = (
    0.004,
    0.0006,
    0.00025,
)  # seconds of a step, of a text and of a prompt's token: SmolLM2-135M
SLOW = (0.004, 0.001, 0.0007)  # the same on two cores without AMX
LARGE = (0.15, 0.02, 0.01)  # of a model of 3 billion parameters


class Timed(Counting):
    """Takes the time of a step that reads the weights once and computes each row."""

    def __init__(self, clock: Clock, cost: tuple[float, float, float], **limits: int) -> None:
        super().__init__(**{"tokens": 512, "selected": 32, "blocks": 4000} | limits)
        self.clock, self.cost = clock, cost

    def step(self, step: StepInput) -> list[Sample]:
        base, text, prompt = self.cost
        lengths = [count for _, count, *_ in step.spans]
        texts = lengths.count(1)
        self.clock.now += base + text * texts + prompt * (sum(lengths) - texts)
        return super().step(step)


class House:
    """An engine with users that come and go as time passes."""

    def __init__(self, cost: tuple[float, float, float], **limits: int) -> None:
        self.clock, self.cost = Clock(), cost
        self.policy = FairPolicy()
        self.engine: Engine = engine(
            Timed(self.clock, cost, **limits), 5000, clock=self.clock, policy=self.policy
        )
        self.times: dict[str, list[float]] = {}  # of each request: when it came, then its tokens
        self.tenants: dict[str, str] = {}
        self._serial = 0

    def ask(self, tenant: str, prompt: int, tokens: int, **more: object) -> str:
        self._serial += 1
        name = f"{tenant}.{self._serial}"
        ids = random.Random(self._serial).choices(range(900), k=prompt)
        params = SamplingParams(max_tokens=tokens, temperature=0)
        self.engine.add(Request(id=name, prompt=ids, params=params, tenant=tenant, **more))  # type: ignore[arg-type]
        self.times[name] = [self.clock.now]
        self.tenants[name] = tenant
        return name

    def step(self) -> list[str]:
        """The ids of requests that have ended."""
        ended = []
        for event in self.engine.step():
            if isinstance(event, Token):
                self.times[event.id].append(self.clock.now)
            if ends(event):
                ended.append(event.id)
        return ended

    def flood(self, prompt: int, tokens: int, count: int = 200) -> None:
        for _ in range(count):
            self.ask("flood", prompt, tokens)

    def visit(self, prompt: int, tokens: int, pause: float) -> str:
        """Another's request, from its coming at some time within a step to its end; a flood goes on."""
        due = self.clock.now + pause
        name = ""
        while True:
            before = self.clock.now
            ended = self.step() if self.engine.has_work else []
            if self.clock.now == before:
                self.clock.now = max(due, before)
            for each in ended:
                if each == name:
                    return name
                if self.tenants[each] == "flood":
                    self.ask("flood", 100, 100)
            if not name and self.clock.now >= due:
                name = self.ask("light", prompt, tokens)
                self.times[name][0] = due  # it came while the step was computed

    def first(self, name: str) -> float:
        return self.times[name][1] - self.times[name][0]

    def gaps(self, name: str) -> Iterator[float]:
        times = self.times[name][1:]
        return (b - a for a, b in zip(times, times[1:], strict=False))


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def visits(house: House, prompt: int, tokens: int = 40, count: int = 24) -> tuple[float, float]:
    """A user's median time to the first token, and the 99th percentile between tokens."""
    rng = random.Random(9)
    names = [house.visit(prompt, tokens, 60 * house.cost[0] * rng.random()) for _ in range(count)]
    firsts = [house.first(name) for name in names]
    return statistics.median(firsts), p99([g for name in names for g in house.gaps(name)])


@pytest.mark.parametrize(
    ("cost", "prompt"), [(SMALL, 100), (SMALL, 150), (SLOW, 100), (LARGE, 100)]
)
def test_a_flood_is_hardly_felt(cost: tuple[float, float, float], prompt: int) -> None:
    """By a tenant that asks one thing after the other: 200 requests of another change its time to the
    first token by half at most, and its time between tokens too, but for what nobody sees."""
    quiet_first, quiet_gap = visits(House(cost), prompt)
    crowded = House(cost)
    crowded.flood(100, 100)
    for _ in range(60):
        crowded.step()
    first, gap = visits(crowded, prompt)
    quantum = LEAST * cost[2]  # of prompts, however long it takes
    assert gap <= OTHERS * max(quiet_gap, EVEN) + quantum
    assert first <= OTHERS * quiet_first  # the rest of a step that it comes in, and its own


@pytest.mark.parametrize("cost", [SMALL, LARGE])
@pytest.mark.parametrize("texts", [1, 8, 24])
@pytest.mark.parametrize("tenant", ["", "other"])
def test_a_long_prompt_stalls_nobody(
    cost: tuple[float, float, float], texts: int, tenant: str
) -> None:
    """The texts of others, of the same tenant or of another, go on while 4,096 tokens are computed."""
    house = House(cost)
    names = [house.ask("", 20, 3000) for _ in range(texts)]
    for _ in range(60):
        house.step()
    quiet = p99([g for name in names for g in house.gaps(name)][-20 * texts :])
    first = house.ask(tenant, 64, 4)  # so that what prompts take is known
    while not house.times[first][4:]:
        house.step()
    for _ in range(5):
        house.step()
    for name in names:
        house.times[name] = house.times[name][-1:]
    long = house.ask(tenant, 4096, 2)
    while not house.times[long][1:]:
        house.step()
    felt = p99(
        [b - a for n in names for a, b in zip(house.times[n], house.times[n][1:], strict=False)]
    )
    assert felt <= OWN * max(quiet, EVEN) + 2 * LEAST * cost[2]


@pytest.mark.parametrize("cost", [SMALL, LARGE])
def test_what_comes_together_begins_soon(cost: tuple[float, float, float]) -> None:
    """Prompts of 32 requests fill steps, as if none of them had begun; later ones do not."""
    house = House(cost)
    names = [house.ask("", 100, 500) for _ in range(32)]
    steps = 0
    while not all(house.times[name][1:] for name in names):
        house.step()
        steps += 1
    assert steps == math.ceil(32 * 100 / 512)
    for name in names[:8]:
        house.engine.abort(name)
    for _ in range(20):  # so that what so many texts take is known
        house.step()
    house.times[names[-1]] = house.times[names[-1]][-1:]
    later = house.ask("", 400, 1)
    while not house.times[later][1:]:
        house.step()
    quiet = cost[0] + 24 * cost[1]
    times = house.times[names[-1]]
    felt = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert max(felt) <= OWN * max(quiet, EVEN) + LEAST * cost[2]


def test_who_waited_for_an_image_did_not_come_together_with_a_later_text() -> None:
    """It is held back for the text, however long ago it came."""
    pace = Pace()
    for now in range(40):
        pace.took([1], 0.010, now)
        pace.took([1, 64], 0.010 + 64 * 0.001, now + 0.5)

    def sequence(pending: int, queued: float, first_token: float, *images: object) -> Any:
        out = MagicMock(images=images)
        out.request.tenant, out.kv.pending = "", pending
        out.times.queued, out.times.first_token = queued, first_token
        return out

    text = sequence(1, 2.0, 3.0)
    rooms = []
    for images in ((), ("picture",)):
        prompt = sequence(600, 1.0, 0.0, *images)
        budget = StepBudget(pace, MagicMock(), [text, prompt], 512, False, False, False)
        rooms.append(budget.room(prompt))
    whole, part = rooms
    assert whole == 512 and part == pytest.approx((OWN * EVEN - 0.010) / 0.001, abs=1)


def test_a_step_that_was_held_up_is_forgotten() -> None:
    """Also where it made what prompts take look so long that only small parts of them are computed."""
    pace, now = Pace(), 0.0

    def took(lengths: list[int], seconds: float) -> None:
        nonlocal now
        now += seconds
        pace.took(lengths, seconds, now)

    for _ in range(8):
        took([1] * 20, 0.024)
        took([1], 0.005)
        took([100], 0.074)
    for _ in range(4):
        took([100], 1.0)
    assert pace.token > 2 * 0.0007
    for _ in range(40):
        took([9], 0.0103)
    assert abs(pace.token - 0.0007) < 0.0002


def test_parts_of_a_prompt_are_told() -> None:
    """While it is computed, so that who gives up is charged what was."""
    e, params = engine(Counting(tokens=64, blocks=64)), SamplingParams(max_tokens=1, temperature=0)
    for progress in (False, True):
        prompt = [int(progress), *range(149)]
        e.add(Request(id="a", prompt=prompt, params=params, progress=progress))
        told = [event for _ in range(3) for event in e.step()]
        parts = [(p.computed, p.cached) for p in told[:-1] if isinstance(p, Progress)]
        assert parts == [(64, 0), (128, 0)][: 2 * progress] and len(told) == len(parts) + 1
        assert isinstance(told[-1], Token) and told[-1].finish
