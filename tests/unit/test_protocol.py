"""Frames between the front and an engine: of a bounded size, whatever is in them."""

from __future__ import annotations

import asyncio

import pytest

from octavo.backends.base import Limits
from octavo.client.protocol import (
    EVENT_BYTES,
    MAX_FRAME,
    Abort,
    Events,
    FrameBuffer,
    Start,
    Submit,
    event_frames,
    frame,
    read_frame,
)
from octavo.engine.constraint import TokenTable
from octavo.engine.events import Token
from octavo.engine.plan import Plan
from octavo.engine.request import Request, SamplingParams


def read(data: bytes) -> list[object]:
    async def run() -> list[object]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        out: list[object] = []
        while not reader.at_eof():
            out.append(await read_frame(reader))
        return out

    return asyncio.run(run())


def test_what_a_step_gave_comes_in_pieces() -> None:
    """As the texts of a wide search do, or a long prompt's log-probabilities: in their order."""
    top = [(i, -float(i)) for i in range(20)]
    events = [Token(f"r{i % 7}.{i}", i, -0.5, top) for i in range(40_000)]
    frames = list(event_frames(events, {"running": 3}))
    assert sum(map(len, frames)) > 8 * EVENT_BYTES and max(map(len, frames)) <= EVENT_BYTES + 4
    messages = read(b"".join(frames))
    assert all(isinstance(m, Events) and m.stats == {"running": 3} for m in messages)
    assert [e for m in messages for e in m.events] == events  # type: ignore[attr-defined]
    assert list(event_frames([], {})) == [frame(Events([], {}))]


def test_what_is_too_long_or_broken() -> None:
    long = Request(id="a", prompt=[1], params=SamplingParams(grammar="x" * MAX_FRAME))
    with pytest.raises(ValueError, match="a frame of"):
        frame(Submit(long))
    with pytest.raises(ValueError, match="a frame of"):
        FrameBuffer().push((MAX_FRAME + 1).to_bytes(4, "little"))
    for broken in (b"\xff\xff\xff\xff", b"\x02\0\0\0\xc1\xc1", b"\x08\0\0\0ab", b"\x01"):
        with pytest.raises(EOFError):
            read(broken)


def test_messages_are_cut_wherever_they_arrive() -> None:
    messages = [Abort("a"), Submit(Request(id="b", prompt=[1, 2], params=SamplingParams()))] * 3
    data = b"".join(map(frame, messages))
    for size in (1, 3, 7, len(data)):
        buffer = FrameBuffer()
        got = [m for i in range(0, len(data), size) for m in buffer.push(data[i : i + size])]
        assert got == messages


def test_a_plan_arrives_as_it_was_sent() -> None:
    plan = Plan(1, 2, 3, 4, 5, 6, 7, 8, "int8", Limits(9, 10, 11), adapters=12, packed=True)
    start = Start("model", TokenTable([b"a"], [], [2]), plan)
    assert FrameBuffer().push(frame(start)) == [start]
