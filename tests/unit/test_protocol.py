"""Frames between the front and an engine: of a bounded size, whatever is in them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import uvloop

from octavo.backends.base import StepLimits
from octavo.client.link import EngineLink
from octavo.client.protocol import (
    EVENT_BYTES,
    MAX_FRAME,
    Abort,
    Events,
    FrameBuffer,
    Loading,
    Start,
    Submit,
    ToEngine,
    ToFront,
    Vocabulary,
    event_frames,
    frame,
)
from octavo.client.spawned import spawn
from octavo.engine.constraint import TokenTable
from octavo.engine.events import Token
from octavo.engine.plan import Plan
from octavo.engine.request import Request, SamplingParams


def read(data: bytes, kind: object = ToFront, size: int = 0) -> list[object]:
    """The messages of bytes that arrive `size` at a time."""
    buffer: FrameBuffer[object] = FrameBuffer(kind)
    out: list[object] = []
    for i in range(0, len(data), size or len(data)):
        buffer.push(data[i : i + (size or len(data))])
        out += iter(buffer.pop, None)
    return out


def test_what_a_step_gave_comes_in_pieces() -> None:
    """As the texts of a wide search do, or a long prompt's log-probabilities: in their order."""
    top = [(i, -float(i)) for i in range(20)]
    events = [Token(f"r{i % 7}.{i}", i, -0.5, top) for i in range(40_000)]
    frames = list(event_frames(Events(events, {"running": 3})))
    assert sum(map(len, frames)) > 8 * EVENT_BYTES and max(map(len, frames)) <= EVENT_BYTES + 4
    messages = read(b"".join(frames))
    assert all(isinstance(m, Events) and m.stats == {"running": 3} for m in messages)
    assert [e for m in messages for e in m.events] == events  # type: ignore[attr-defined]
    assert list(event_frames(Events([], {}))) == [frame(Events([], {}))]


def test_what_is_too_long_or_broken() -> None:
    long = Request(id="a", prompt=[1], params=SamplingParams(grammar="x" * MAX_FRAME))
    with pytest.raises(ValueError, match="a frame of"):
        frame(Submit(long))
    with pytest.raises(ValueError, match="a frame of"):
        read((MAX_FRAME + 1).to_bytes(4, "little"), ToEngine)
    for broken in (b"\xff\xff\xff\xff", b"\x02\0\0\0\xc1\xc1"):
        with pytest.raises(ValueError):
            read(broken)
    for part in (b"\x01", b"\x08\0\0\0ab"):
        assert read(part) == []


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[EngineLink, socket.socket]]:
    """A link whose process prints a text and ends, and the other end of its socket."""
    process = spawn(module="this")
    process.sock.close()
    ours, theirs = socket.socketpair()
    with theirs:
        link = EngineLink(replace(process, sock=ours))
        try:
            await link.open()
            yield link, theirs
        finally:
            link.kill()
            await link.end()


def test_a_process_that_sends_no_frames_has_ended() -> None:
    """As one that has ended: it is replaced."""

    async def run(said: bytes) -> None:
        async with linked() as (link, theirs):
            theirs.sendall(frame(Loading(1)) + said)
            assert await link.receive() == Loading(1)
            with pytest.raises(EOFError):
                theirs.shutdown(socket.SHUT_WR)
                await link.receive()

    for said in (b"\xff\xff\xff\xff", b"\x02\0\0\0\xc1\xc1", b"\x08\0\0\0ab", b""):
        uvloop.run(run(said))


def test_messages_to_a_process_that_has_ended_are_dropped() -> None:
    """Whoever sends them waits for the next process; only the reader is told."""

    async def run() -> None:
        async with linked() as (link, theirs):
            link.send(Abort("not read by then"))
            theirs.close()
            for _ in range(8):
                link.send(Abort("a"))
                await asyncio.sleep(0)
            with pytest.raises(EOFError):
                await link.receive()
            link.send(Abort("a"))

    uvloop.run(run())


def test_messages_are_cut_wherever_they_arrive() -> None:
    messages = [Abort("a"), Submit(Request(id="b", prompt=[1, 2], params=SamplingParams()))] * 3
    data = b"".join(map(frame, messages))
    for size in (1, 3, 7, len(data)):
        assert read(data, ToEngine, size) == messages


def test_a_plan_arrives_as_it_was_sent() -> None:
    plan = Plan(
        1, 2, 3, 4, 5, 6, 7, 8, "int8", "auto", StepLimits(9, 10, 11), adapters=12, packed=True
    )
    start, tokens = Start("model", plan), Vocabulary(TokenTable([b"a"], [], [2]))
    assert read(frame(start) + frame(tokens), ToEngine) == [start, tokens]
