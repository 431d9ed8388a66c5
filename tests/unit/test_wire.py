"""What a response is sent in: its head goes out with its body, and never after it or twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from octavo.server.wire import BEGINNING, Wire

HEAD, BODY = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n", b"body"


class Recorder:
    """A transport that notes what it is asked to do."""

    def __init__(self) -> None:
        self.done: list[bytes] = []
        self.closing = False

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def write_eof(self) -> None:
        self.done.append(b"eof")

    def close(self) -> None:
        self.done.append(b"close")
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing


def done(work: Callable[[Wire], None]) -> tuple[list[bytes], list[bytes]]:
    """What a transport was asked by the end of an iteration of the event loop, and by that of the
    next."""

    async def run() -> tuple[list[bytes], list[bytes]]:
        recorder = Recorder()
        work(Wire(cast(asyncio.Transport, recorder)))
        at_once = list(recorder.done)
        await asyncio.sleep(0)
        return at_once, recorder.done

    return asyncio.run(run())


def test_a_head_goes_out_with_its_body() -> None:
    def answer(wire: Wire) -> None:
        wire.write(HEAD)
        wire.write(BODY)
        wire.write(BODY)

    assert done(answer) == ([HEAD + BODY, BODY], [HEAD + BODY, BODY])


def test_a_head_waits_no_longer_than_the_event_loop() -> None:
    assert done(lambda wire: wire.write(HEAD)) == ([], [HEAD])


def test_answers_stay_in_their_order() -> None:
    def answers(wire: Wire) -> None:
        wire.write(HEAD)
        wire.write(HEAD + BODY)

    assert done(answers) == ([HEAD], [HEAD, HEAD + BODY])


@pytest.mark.parametrize("ahead", [1, len(BEGINNING), len(BEGINNING) + 3])
def test_what_was_sent_ahead_is_not_sent_again(ahead: int) -> None:
    def answer(wire: Wire) -> None:
        for _ in range(ahead):
            wire.begin_answer()
        wire.write(HEAD)
        wire.write(BODY)

    at_once, after = done(answer)
    assert at_once == after and b"".join(after) == HEAD + BODY
    assert len(after) == min(ahead, len(BEGINNING)) + 1


def test_what_is_sent_ahead_of_the_next_answer_comes_after_a_head() -> None:
    def answers(wire: Wire) -> None:
        wire.write(HEAD)
        wire.begin_answer()
        wire.write(HEAD)
        wire.write(BODY)

    _, after = done(answers)
    assert b"".join(after) == HEAD + HEAD + BODY


@pytest.mark.parametrize(("way", "said"), [("close", b"close"), ("write_eof", b"eof")])
def test_an_end_comes_after_the_head(way: str, said: bytes) -> None:
    def answer(wire: Wire) -> None:
        wire.write(HEAD)
        getattr(wire, way)()

    assert done(answer) == ([HEAD, said], [HEAD, said])


def test_nothing_is_written_to_a_connection_that_was_cut() -> None:
    def answer(wire: Wire) -> None:
        wire.write(HEAD)
        wire.abort()

    assert done(answer) == ([], [])


def test_nothing_is_sent_after_the_end() -> None:
    """As an invitation to go on would be, of a request that has been refused."""

    def refuse(wire: Wire) -> None:
        wire.write_eof()
        wire.write(HEAD)

    assert done(refuse) == ([b"eof"], [b"eof"])
