"""Which requests are taken, what is told to the others, and how true that is: an engine on a virtual clock."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import asdict

from octavo.client.load import Load, QueueLimits
from octavo.client.replay import Stream
from octavo.engine.events import Token, ends
from octavo.engine.request import Request, SamplingParams
from octavo.errors import Overloaded
from octavo.vision.image import ImageInput
from tests.engine.test_engine import Clock, engine
from tests.engine.test_pace import SMALL, Timed


def stream(
    tenant: str = "", prompt: int = 10, tokens: int | None = 20, given: int = 0, now: float = 0.0,
    **more: object,
) -> Stream:  # fmt: skip
    params = SamplingParams(max_tokens=tokens, temperature=0)
    ids = random.Random(str((tenant, prompt, tokens, random.random()))).choices(
        range(900), k=prompt
    )
    request = Request(id="r", prompt=ids, params=params, tenant=tenant, **more)  # type: ignore[arg-type]
    made = Stream.of(request, now)
    made.given = [1] * given
    return made


class Front:
    """Requests of an engine, and what is known of them without asking it."""

    def __init__(self, queue: QueueLimits, places: int = 8) -> None:
        self.clock, self.queue, self.places = Clock(), queue, places
        self.engine = engine(Timed(self.clock, SMALL, selected=places), 5000, clock=self.clock)
        self.streams: dict[str, Stream] = {}
        self.first: dict[str, float] = {}
        self._serial = 0

    @property
    def load(self) -> Load:
        stats = asdict(self.engine.stats())
        return Load.of(self.streams.values(), self.places, stats)

    def ask(self, new: Stream) -> str:
        self.queue.check(new, self.load)
        self._serial += 1
        name = str(self._serial)
        request = Request(
            **{f: getattr(new.request, f) for f in new.request.__struct_fields__} | {"id": name}
        )
        self.engine.add(request)
        self.streams[name] = new
        return name

    def step(self) -> None:
        for event in self.engine.step():
            one = self.streams[event.id]
            one.take(event)
            if isinstance(event, Token):
                self.first.setdefault(event.id, self.clock.now)
            if ends(event):
                del self.streams[event.id]

    def until(self, time: float) -> None:
        while self.clock.now < time and self.engine.has_work:
            self.step()
        self.clock.now = max(self.clock.now, time)

    def warm(self) -> None:
        """So that the times of steps and of prompts are known."""
        for _ in range(2 * self.places):
            self.ask(stream(prompt=300, tokens=30))
            self.until(self.clock.now + 0.05)
        while self.engine.has_work:
            self.step()


def test_classes_and_light_tenants_find_a_place() -> None:
    queue = QueueLimits(20)

    def taken(new: Stream, **counts: int) -> bool:
        streams = [stream(tenant) for tenant, n in counts.items() for _ in range(n)]
        try:
            queue.check(new, Load(streams, 8))
        except Overloaded as e:
            assert e.status == 503 and e.code == "overloaded"
            return False
        return True

    assert taken(stream("a"), a=19) and not taken(stream("a"), a=20)
    assert taken(stream("a", priority=1), a=14) and not taken(stream("a", priority=1), a=15)
    assert taken(stream("a", priority=-1), a=24) and not taken(stream("a", priority=-1), a=25)
    assert taken(stream("b"), a=20) and taken(stream("b"), a=20, b=4)
    assert not taken(stream("b"), a=10, b=10) and not taken(stream("b"), a=25)
    assert not taken(stream("a"), a=20, b=1)


def test_tokens_that_wait_are_limited() -> None:
    queue, begun = QueueLimits(100, 1000), stream(prompt=5000, given=3)
    waiting = [begun, *(stream(prompt=300) for _ in range(3))]
    queue.check(stream(prompt=100), Load(waiting, 8))
    with pytest.raises(Overloaded, match="900 tokens of prompts wait; 1,000 may") as refused:
        queue.check(stream(prompt=101), Load(waiting, 8, 0.01, 0.5))
    assert refused.value.retry_after == 0.5  # one token too many
    queue.check(stream(prompt=4000), Load([begun], 8))  # alone it is taken, however long


def test_images_in_flight_are_limited() -> None:
    """Server and engine hold the pixels of each until its request ends."""
    queue = QueueLimits(100, pixels=4 << 20)

    def shows(mib: int, tenant: str = "", group: str = "", **more: int) -> Stream:
        pixels = np.zeros((1, 1024, 1024, 3), np.uint8)[:, :, : 1024 * mib // 3]
        image = ImageInput.of(pixels, (1, 1), 4)
        return stream(tenant, group=group, images=[image], **more)

    def taken(new: Stream, *held: Stream) -> bool:
        try:
            queue.check(new, Load(held, 8))
        except Overloaded as e:
            assert "images are in flight; 4 may be" in str(e)
            return False
        return True

    three = shows(3, group="g")
    assert taken(shows(1), three) and not taken(shows(3), three)
    assert taken(stream(), three) and taken(shows(9), stream())  # whoever has the only ones
    assert taken(shows(3, group="g"), three) and taken(shows(3, group="g"), three, shows(3))
    other = Stream.of(three.request, 0.0)  # another choice, with the same image
    assert taken(shows(1), three, other) and not taken(shows(1), three, other, shows(1))
    # Shares are those of requests: a quarter more for P0 and light tenants, less for P2.
    assert taken(shows(2, priority=-1), three) and not taken(shows(1, priority=1), three)
    assert taken(shows(1, "b"), shows(3, "a"), shows(1, "a"))
    assert not taken(shows(3, "b"), shows(3, "a"), shows(1, "a"))
    with pytest.raises(Overloaded, match="^3 MiB of images are in flight; 4 may be$") as refused:
        long = shows(3, tokens=100)
        texts = [stream(tokens=20, given=1), stream(prompt=1000, tokens=20)]
        queue.check(shows(3), Load([long, *texts], 8, 0.01, 0.01))
    # Not the end of a text without images; but its prompt may come first.
    assert refused.value.retry_after == pytest.approx(100 * 0.01 + 1010 * 0.01)
    assert queue.divided(3).pixels == -(-(4 << 20) // 3)


def test_choices_of_a_prompt_do_not_wait_for_it_again() -> None:
    """It is computed once, so a request with many of them is taken as one with one is."""
    queue, first = QueueLimits(100, 1000), stream(prompt=800, timeout=10.0, group="g")
    streams = [first]
    for _ in range(8):
        one = Stream.of(first.request, 0.0)
        load = Load(streams, 64, 0.01, 0.01)
        queue.check(one, load)
        assert load.waiting == 800 and load.wait(one) == 0
        streams.append(one)
    late = stream(prompt=100, timeout=10.0)
    assert Load(streams, 64, 0.01, 0.01).wait(late) == 8.0
    with pytest.raises(Overloaded, match="800 tokens of prompts wait"):
        queue.check(stream(prompt=201), Load(streams, 64, 0.01, 0.001))


def test_prompts_of_one_call_are_taken_together() -> None:
    """Else a call with more tokens than may wait would be refused however often it comes again."""
    queue, streams = QueueLimits(100, 1000), []
    for _ in range(5):
        one = stream(prompt=400, group="g")
        queue.check(one, Load(streams, 8))
        streams.append(one)
    for group in ("", "h"):
        with pytest.raises(Overloaded, match="2,000 tokens of prompts wait; 1,000 may"):
            queue.check(stream(prompt=1, group=group), Load(streams, 8, 0.01, 0.1))
    with pytest.raises(Overloaded):  # no group is no group of its own
        queue.check(stream(prompt=901), Load([stream(prompt=100)], 8))


@pytest.mark.parametrize("tokens", [5, 40])
def test_who_comes_back_when_told_is_taken(tokens: int) -> None:
    """And would not have been much before: what is told is the time that it takes."""
    front, rng = Front(QueueLimits(24)), random.Random(tokens)
    front.warm()
    told: list[float] = []
    waited: list[float] = []
    for _ in range(60):
        try:
            while True:
                front.ask(stream(prompt=rng.randrange(20, 200), tokens=tokens))
        except Overloaded as e:
            told.append(e.retry_after or 0.0)
        began = front.clock.now
        while len(front.streams) >= 24:
            front.step()
        waited.append(front.clock.now - began)
        front.until(began + told[-1])
        assert len(front.streams) < 24
    assert statistics.mean(waited) <= statistics.mean(told) <= 2 * statistics.mean(waited) + 0.05


def test_the_wait_for_others_is_known() -> None:
    """As what a request then really waits, on the average and in most cases."""
    front, rng = Front(QueueLimits(1000)), random.Random(3)
    front.warm()
    ratios = []
    for turn in range(40):
        for tenant in "aab"[: 1 + turn % 3]:
            for _ in range(rng.randrange(2, 14)):
                front.ask(stream(tenant, rng.randrange(50, 400), rng.randrange(10, 60)))
        front.until(front.clock.now + rng.random() / 2)
        new = stream("c" if turn % 2 else "a", 100, 5)
        expected = front.load.wait(new) + 100 * front.load.prompt_token
        came = front.clock.now
        name = front.ask(new)
        while name not in front.first:
            front.step()
        ratios.append((expected + 0.03) / (front.first[name] - came + 0.03))
        while front.engine.has_work:
            front.step()
    print(sorted(round(r, 2) for r in ratios))
    assert 0.7 <= statistics.median(ratios) <= 1.4
    assert sum(0.4 <= r <= 2.5 for r in ratios) >= 0.9 * len(ratios)


def test_what_cannot_be_in_time_is_refused_at_once() -> None:
    front = Front(QueueLimits(1000))
    front.warm()
    idle = front.clock.now
    front.ask(stream("a", 100, 5, ttft=0.001, now=idle))  # nobody is before it: it is tried
    for _ in range(30):
        front.ask(stream("a", 400, 50, now=idle, priority=-1))
    for field, name in (("ttft", "x-slo-ttft-ms"), ("timeout", "timeout")):
        with pytest.raises(Overloaded, match="of others' work, not in 0.5 s") as refused:
            front.ask(
                stream(
                    "a", 100, 5, now=idle, timeout=0.5, **({"ttft": 0.5} if field == "ttft" else {})
                )
            )
        assert (refused.value.param, refused.value.code) == (name, "deadline_exceeded")
        assert 0 < (refused.value.retry_after or 0) < 60
    front.ask(stream("a", 100, 5, timeout=80.0, now=idle))
    assert front.clock.now == idle


def test_what_is_due_first_waits_for_nothing_that_is_not() -> None:
    """Of its own tenant or of another that has much to do: it is taken, and it is in time."""
    for tenant in "ab":
        front = Front(QueueLimits(1000))
        front.warm()
        came = front.clock.now
        for _ in range(30):
            front.ask(stream("a", 400, 50, now=came))
        one = front.ask(stream(tenant, 100, 5, ttft=0.5, now=came))
        while one not in front.first:
            front.step()
        assert front.first[one] - came <= 0.5


class Looked(list[Stream]):
    """Counts how often somebody goes through it."""

    looks = 0

    def __iter__(self) -> Iterator[Stream]:
        self.looks += 1
        return super().__iter__()


def test_what_is_looked_at_for_a_request_does_not_grow_with_the_square_of_the_others() -> None:
    """Where none of them names a number of tokens: a full server refuses many a second."""
    looks = []
    for count in (10, 100):
        streams = Looked(stream(tokens=None, given=3) for _ in range(count))
        load = Load(streams, 8, 1.0)
        assert load.until_one_ends(load.streams) == 3.0
        assert load.wait(stream()) == 3.0
        looks.append(streams.looks)
    assert looks[0] == looks[1]
