"""Streams of upstreams at the gateway: how long their parts are waited for, and what is counted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest
import uvloop
from starlette.responses import Response

from octavo.gateway.body import Relayed, read_outline
from octavo.gateway.config import Model
from octavo.gateway.errors import UpstreamFailed
from octavo.gateway.job import RelayJob
from octavo.gateway.passage import Passage
from octavo.gateway.traffic import Dealt
from octavo.gateway.transport import Answer, Timeouts, Transport
from octavo.gateway.upstream import ModelFigures, Place
from octavo.gateway.upstreams import Upstreams
from octavo.generate.reply import Usage
from octavo.server.exchange import Exchange
from tests.unit.test_gateway_moments import FOREVER, STREAM, relaying, upstream

EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def a_job() -> RelayJob:
    body, path = b'{"model":"m","prompt":"xxxx","stream":true}', "/v1/completions"
    asked = Relayed(path, path, body, read_outline(body))
    return RelayJob(asked, {}, Dealt("m", Model()), Usage(), asked.resume())


async def begun(
    timeouts: Timeouts, pause: float, then: float, own: bool
) -> tuple[bytes, UpstreamFailed | None]:
    """What a gateway hears of a stream whose headers come at once, its first event after a pause,
    and its end after another; and why it hears no more, if it does not. own: Octavo's."""

    async def answers(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        for seconds, part in ((pause, EVENT), (then, DONE)):
            await writer.drain()
            await asyncio.sleep(seconds)
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        writer.write(b"0\r\n\r\n")

    async with upstream(answers) as url:
        upstreams, transport = Upstreams(), Transport(timeouts)
        upstreams.up(upstreams.add(Place(url)), {"m": ModelFigures()}, own)
        relay, queue = relaying(upstreams, transport)
        job, said = a_job(), b""
        lease = await queue.place(job.asked, job.dealt.pools, job.failed, None)
        job.lease = lease
        try:
            found = await relay._limited(job, lease)
            assert not isinstance(found, Response)
            answer, data = found
            while data:
                said += data
                data = await answer.read()
        except UpstreamFailed as e:
            return said, e
        finally:
            await transport.close()
        answer.close()
        return said, None


@pytest.mark.parametrize("own", [True, False])
def test_a_stream_whose_headers_have_come_may_take_until_its_first_token(own: bool) -> None:
    """Servers send them before they have computed anything, and have begun nothing by that."""
    timeouts = Timeouts(first=FOREVER, idle=0.02)
    assert uvloop.run(begun(timeouts, 0.3, 0, own)) == (EVENT + DONE, None)


def test_a_first_token_that_does_not_come_after_headers_may_be_for_overload() -> None:
    """So that its retries are those of the budget."""
    said, error = uvloop.run(begun(Timeouts(first=0.2, idle=0.02), FOREVER, 0, False))
    assert said == b"" and error is not None
    assert str(error).endswith(" gave no first token for 0.2 s")
    assert (error.code, error.busy) == ("upstream_timeout", True)


@pytest.mark.parametrize(("own", "idle"), [(True, "0.1"), (False, "0.3")])
def test_a_stream_that_has_begun_may_pause_for_less(own: bool, idle: str) -> None:
    said, error = uvloop.run(begun(Timeouts(first=FOREVER, idle=0.1), 0, FOREVER, own))
    assert said == EVENT and error is not None
    assert str(error).endswith(f" said nothing for {idle} s")


@pytest.mark.parametrize("usage", [b"", b'data: {"usage":{"completion_tokens":40}}\n\n'])
def test_releases_and_times_hear_of_the_tokens_that_are_counted(usage: bytes) -> None:
    job = a_job()
    answer = SimpleNamespace(media_type="text/event-stream", connection=SimpleNamespace(heard=0.0))
    passage = Passage(job, cast(Answer, answer), Exchange(), False)
    for i, part in enumerate((EVENT * 3, EVENT, usage + DONE)):
        answer.connection.heard = 10.0 + i
        assert passage.feed(part) == part
    assert passage.end() == b""
    tokens = 40 if usage else 4
    assert (job.usage.prompt, job.usage.completion, job.tokens) == (2, tokens, tokens)
    assert job.finished(Exchange()).itl == 2 / (tokens - 1)
