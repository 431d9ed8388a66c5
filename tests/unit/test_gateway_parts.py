"""Parts of a gateway without a network: routes, bodies, places, upstreams, simulated engines."""

from __future__ import annotations

import asyncio
import json
import random
import time
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.balance.breaker import Breaker
from octavo.balance.chain import text_chain
from octavo.balance.cost import Ask
from octavo.engine.request import MIN_TIMEOUT
from octavo.errors import DeadlineExceeded, InvalidValue, Overloaded, UsageError
from octavo.experiments.controller import Chosen, Experiments
from octavo.experiments.spec import Variant
from octavo.gateway.admission import UpstreamQueue, WaitLimits
from octavo.gateway.answer_rate import AnswerRate
from octavo.gateway.answers import complete
from octavo.gateway.app import PASSED_DIALECTS, AboutGateway, Door
from octavo.gateway.body import (
    BLOCK_TOKENS,
    OPERATIONS,
    PREFIX_BYTES,
    RESPONSES,
    Relayed,
    read_outline,
)
from octavo.gateway.config import Model
from octavo.gateway.errors import KeeperGone, NoUpstream, UnknownModel
from octavo.gateway.events import Finished
from octavo.gateway.headers import onward
from octavo.gateway.job import RelayJob
from octavo.gateway.seen import Seen
from octavo.gateway.shadow import Shadow
from octavo.gateway.traffic import Dealt, Traffic
from octavo.gateway.upstream import (
    ANY,
    DEFAULT,
    FALLBACK,
    ModelFigures,
    Place,
    Upstream,
    parse_place,
)
from octavo.gateway.upstreams import Upstreams
from octavo.generate.reply import Usage
from octavo.release.controller import Assigned, Releases
from octavo.release.events import RequestEvent
from octavo.server.dialects.openai.schemas import CompletionBody
from octavo.simulate.engine import SimulatedEngine, SimulatedRequest, Speed

POOLS = (DEFAULT, FALLBACK)


def asked(path: str = "/v1/completions", **fields: object) -> Relayed:
    body = json.dumps({"model": "m", "prompt": "x", "stream": True} | fields).encode()
    return Relayed(path, path, body, read_outline(body))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("http://a:1", Place("http://a:1")),
        ("http://a:1/v1/", Place("http://a:1")),
        ("next=https://a/base/v1", Place("https://a/base", "next")),
    ],
)
def test_places(text: str, place: Place) -> None:
    assert parse_place(text) == place


EXAMPLE = "http://127.0.0.1:8001"


@pytest.mark.parametrize(
    ("text", "instead"),
    [("a:1", "http://a:1"), ("a:1/v1", "http://a:1"), ("http://u:p@a", "http://a"),
     ("ftp://a", EXAMPLE), ("http://", EXAMPLE), ("http://a:0", EXAMPLE), ("a:1:2", EXAMPLE),
     ("http://a?x=y", EXAMPLE), ("http://a:x", EXAMPLE), ("=http://a", EXAMPLE)],
)  # fmt: skip
def test_what_is_no_place(text: str, instead: str) -> None:
    with pytest.raises(UsageError) as e:
        parse_place(text)
    assert e.value.suggestions == (f"--upstream {instead}",)
    parse_place(instead)


@pytest.mark.parametrize(
    ("fields", "resumable"),
    [({}, True), ({"n": 1}, True), ({"n": 2}, False), ({"echo": True}, False),
     ({"best_of": 3}, False), ({"prompt": ["a", "b"]}, False), ({"stream": False}, False),
     ({"beam_width": 2}, False), ({"resume": {}}, False), ({"resume": None}, False),
     ({"n": None, "echo": False}, True)],
)  # fmt: skip
def test_which_streams_can_go_on(fields: dict[str, object], resumable: bool) -> None:
    assert (asked(**fields).resume() is not None) == resumable
    assert asked("/v1/messages", **fields).resume() is None


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model":3}', b"\xff", b"[" * 5000])
def test_bodies_that_cannot_be_read(body: bytes) -> None:
    with pytest.raises(InvalidValue):
        read_outline(body)


def test_equal_beginnings_are_equal_blocks() -> None:
    one, two = asked(prompt="a" * 2000), asked(prompt="a" * 1500 + "b" * 500)
    assert one.ask.blocks[:2] == two.ask.blocks[:2] != ()
    assert one.ask.blocks != two.ask.blocks
    assert one.ask.tokens == 501


@pytest.mark.parametrize(
    ("tail", "ended"),
    [(b"data: [DONE]\n\n", True), (b"data:[DONE]\r\n\r\n", True),
     (b'data: {"choices":[]}\n\ndata: [DONE]\n\n', True), (b"data: [DONE]\n\n: bye\n\n", True),
     (b'data: {"choices":[{"text":"the end is data: [DONE]"}]}\n\n', False)],
)  # fmt: skip
def test_a_stream_ends_with_a_line_and_not_with_a_text_that_says_so(
    tail: bytes, ended: bool
) -> None:
    job = RelayJob(asked(), {}, Dealt("m", Model()), Usage(), ends=(b"", tail))
    assert complete(job) == ended


def test_choices_that_say_the_same_do_not_repeat_themselves() -> None:
    def choice(index: int, text: str) -> dict[str, object]:
        return {"index": index, "message": {"content": text}, "finish_reason": "stop"}

    said, circle = "The capital of France is Paris.", "and so on " * 12
    for texts, found in (([said] * 4, False), ([said, circle], True)):
        seen = Seen()
        answer = {"choices": [choice(i, text) for i, text in enumerate(texts)]}
        seen.whole(json.dumps(answer).encode())
        assert (seen.repeating, seen.empty) == (found, False)
    seen = Seen()
    seen.whole(json.dumps({"choices": [choice(0, circle) | {"index": None}]}).encode())
    assert (seen.repeating, seen.empty) == (True, False)  # as a server may write that has one


@pytest.mark.parametrize("space", ["", " "])
@pytest.mark.parametrize(
    ("said", "empty"),
    [({"content": ""}, True), ({"role": "assistant", "content": None}, True),
     ({"content": "Yes"}, False), ({"reasoning": "Well,"}, False),
     ({"reasoning_content": "Well,"}, False), ({"refusal": "No."}, False),
     ({"function_call": {"name": "f", "arguments": ""}}, False)],
)  # fmt: skip
def test_an_answer_with_thoughts_or_calls_alone_is_not_empty(
    said: dict[str, object], empty: bool, space: str
) -> None:
    for name in ("message", "delta"):
        seen, answer = Seen(), {"choices": [{name: said, "finish_reason": "length"}]}
        if name == "message":
            seen.whole(json.dumps(answer).encode())
        else:
            seen.feed(f"data:{space}{json.dumps(answer)}\n\n".encode())
        assert seen.empty == empty


@pytest.mark.parametrize(("most", "empty"), [(0, False), (8, True)])
def test_a_prompt_that_is_only_computed_is_no_empty_answer(most: int, empty: bool) -> None:
    """A version is not blamed for saying nothing where nothing was asked for."""
    told: list[RequestEvent] = []

    class Told:
        def observe(self, model: str, assigned: Assigned, event: RequestEvent) -> None:
            told.append(event)

    traffic = Traffic(cast(Releases, Told()), cast(Experiments, None), cast(Shadow, None))
    seen = Seen()
    seen.whole(b'{"choices":[{"text":"","finish_reason":"length"}]}')
    assigned = Assigned("r", "p", "canary", 0, True, "s", "p", 0.0)
    dealt = Dealt("m", Model(), assigned, seen=seen)
    ended = Finished("m", "canary", "a", "p", 200, None, 1.0, 1.0, None, 5, 0, 0, 0)
    traffic.ended(dealt, asked(max_tokens=most), ended, 0, 1, False)
    assert [event.empty for event in told] == [empty]


@pytest.mark.parametrize(("retries", "blamed"), [(1, [True]), (0, [])])
def test_who_answers_in_a_versions_place_is_blamed_on_the_version_alone(
    retries: int, blamed: list[bool]
) -> None:
    """An experiment wants to know what its client got, whoever that came from."""
    versions: list[RequestEvent] = []
    variants: list[RequestEvent] = []

    class Told:
        def observe(self, model: str, assigned: Assigned, event: RequestEvent) -> None:
            versions.append(event)

    class Counted:
        def observe(self, chosen: Chosen, event: RequestEvent) -> None:
            variants.append(event)

    traffic = Traffic(cast(Releases, Told()), cast(Experiments, Counted()), cast(Shadow, None))
    assigned = Assigned("r", "next", "canary", 0, True, "default", "next", 0.0)
    chosen = Chosen("e", "a", Variant(weight=1), "u", 0)
    dealt = Dealt("m", Model(), assigned, chosen, Seen())
    ended = Finished("m", "canary", "a", "default", 200, None, 1.0, 0.5, 0.1, 5, 3, retries, 0, 0)
    traffic.ended(dealt, asked(), ended, 0, 1, False)
    assert [event.failed for event in versions] == blamed
    assert [(event.failed, event.ttft) for event in variants] == [(False, 0.5)]


def test_operations_have_the_names_of_the_servers() -> None:
    routes = {route.path for dialect in PASSED_DIALECTS for route in dialect.routes}
    named = {path for paths in OPERATIONS.values() for path in paths}
    silent = {path for path in routes if path.endswith(("tokenize", "count_tokens", "apply-template", "show"))}  # fmt: skip
    assert routes | {RESPONSES} == named | silent and not named & silent
    assert asked("/v1/messages").operation == "chat" and asked("/tokenize").operation == "other"


def test_traces_go_on_at_upstreams() -> None:
    """And keys only where they are not the gateway's own."""
    given = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "authorization": "Bearer k", "x": "y"}
    assert onward(given, "id", guarded=True) == {"traceparent": given["traceparent"], "x-request-id": "id"}  # fmt: skip
    assert onward(given, "id", guarded=False).items() > {("authorization", "Bearer k")}


def known(*names: str, places: int = 256, models: str = "m") -> Upstreams:
    upstreams, figures = Upstreams("least-load", places), dict.fromkeys(models, ModelFigures())
    for name in names:
        upstreams.up(upstreams.add(Place(f"http://{name}")), figures, True)
    return upstreams


def test_the_line_is_in_order_of_priority_then_of_arrival() -> None:
    async def run() -> list[str]:
        upstreams = known("a", places=1)
        admission = UpstreamQueue(upstreams, WaitLimits())
        served: list[str] = []
        first = await admission.place(asked(), POOLS)

        async def wait(name: str, priority: int) -> None:
            lease = await admission.place(asked(priority=priority), POOLS)
            served.append(name)
            lease.end(True)

        tasks = []
        for name, priority in (("late", 5), ("one", 0), ("two", 0), ("urgent", -1)):
            tasks.append(asyncio.create_task(wait(name, priority)))
            await asyncio.sleep(0)
        tasks[1].cancel()  # who leaves is nobody's turn
        first.end(True)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert admission.waiting == 0 and upstreams.get("a").requests == 0
        return served

    assert asyncio.run(run()) == ["urgent", "two", "late"]


@pytest.mark.parametrize("places", [1, 2])
def test_who_is_first_of_all_models_is_first_at_an_upstream(places: int) -> None:
    """Also where several places are free at once."""

    async def run() -> None:
        upstreams = known("a", places=1, models="mn")
        admission = UpstreamQueue(upstreams, WaitLimits())
        leases = [await admission.place(asked(), POOLS)]
        served: list[int] = []

        async def wait(model: str, priority: int) -> None:
            leases.append(await admission.place(asked(model=model, priority=priority), POOLS))
            served.append(priority)

        tasks = []
        for model, priority in (("m", 7), ("m", 0), ("m", 3), ("n", 2), ("n", 1), ("n", 8)):
            tasks.append(asyncio.create_task(wait(model, priority)))
            await asyncio.sleep(0)
        upstreams.configure("least-load", places)
        for _ in range(20):  # one by one, as places are free
            if leases:
                leases.pop().end(True)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert served == [0, 1, 2, 3, 7, 8]

    asyncio.run(run())


def test_senders_have_turns() -> None:
    """However many requests of one wait, another's are among the next; each one's are in order."""

    async def run() -> None:
        upstreams = known("a", places=1)
        admission = UpstreamQueue(upstreams, WaitLimits())
        leases = [await admission.place(asked(), POOLS)]
        served: list[str] = []

        async def wait(name: str) -> None:
            request = msgspec.structs.replace(asked(), tenant=name[0])
            leases.append(await admission.place(request, POOLS))
            served.append(name)

        async def serve(most: int) -> None:
            for _ in range(most):
                leases.pop().end(True)
                await asyncio.sleep(0)
                await asyncio.sleep(0)

        async def come(*names: str) -> list[asyncio.Task[None]]:
            found = [asyncio.create_task(wait(name)) for name in names]
            await asyncio.sleep(0)
            return found

        tasks = await come(*(f"a{i}" for i in range(8)), "b0", "b1")
        await serve(6)
        assert served == ["a0", "b0", "a1", "b1", "a2", "a3"]
        tasks += await come("b2", "b3", "c0", "a8")  # nobody is owed for the time before
        await serve(9)
        assert served[6:] == ["b2", "c0", "a4", "b3", "a5", "a6", "a7", "a8"]
        leases.append(await admission.place(asked(), POOLS))
        admission.limits = WaitLimits(2)
        tasks += await come("a0", "a1")
        refused = await come("a2", "a2", "a2")  # who is no further behind for that
        admission.limits = WaitLimits()
        tasks += await come("a3", "b0", "b1", "b2", "b3")
        await serve(8)
        assert served[14:] == ["a0", "b0", "a1", "b1", "a3", "b2", "b3"]
        assert {type(task.exception()) for task in refused} == {NoUpstream}
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_senders_have_turns_whichever_models_they_ask_for() -> None:
    async def run() -> None:
        admission = UpstreamQueue(known("a", places=1, models="mno"), WaitLimits())
        leases = [await admission.place(asked(), POOLS)]
        served: list[str] = []

        async def wait(tenant: str, model: str) -> None:
            request = msgspec.structs.replace(asked(model=model), tenant=tenant)
            leases.append(await admission.place(request, POOLS))
            served.append(tenant + model)

        waiting = [("a", "m"), ("a", "n"), ("a", "o"), ("b", "m"), ("b", "n")]
        tasks = [asyncio.create_task(wait(*each)) for each in waiting]
        await asyncio.sleep(0)
        for _ in range(30):
            if leases:
                leases.pop().end(True)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert served == ["am", "bm", "an", "bn", "ao"]

    asyncio.run(run())


def test_who_comes_too_late_gets_no_place() -> None:
    """Also where one is free: it has been asked for again, after something else took its time."""

    async def run() -> None:
        admission = UpstreamQueue(known("a", places=1), WaitLimits())
        with pytest.raises(DeadlineExceeded):
            await admission.place(asked(), POOLS, due=time.monotonic())
        (await admission.place(asked(), POOLS, due=time.monotonic() + 60)).end(True)

    asyncio.run(run())


def test_a_full_line_refuses_the_last() -> None:
    """Which is of the worst priority, and of the sender that has most."""

    async def run() -> None:
        admission = UpstreamQueue(known("a", places=1), WaitLimits(3))
        await admission.place(asked(), POOLS)
        tasks: dict[str, asyncio.Task[object]] = {}

        async def come(name: str, priority: int) -> list[str]:
            """Who is refused."""
            request = msgspec.structs.replace(asked(priority=priority), tenant=name[0])
            tasks[name] = asyncio.create_task(admission.place(request, POOLS))
            for _ in range(3):
                await asyncio.sleep(0)
            gone = [name for name, task in tasks.items() if task.done()]
            for each in gone:
                with pytest.raises(
                    NoUpstream, match="3 requests wait already, all before"
                ) as found:
                    tasks.pop(each).result()
                assert found.value.retry_after > 0
            return gone

        come_first = [("a0", 5), ("a1", 5), ("a2", 5)]
        assert [await come(*each) for each in come_first] == [[], [], []]
        assert await come("a3", 5) == ["a3"]
        assert await come("b0", 5) == ["a2"]
        assert await come("b1", 6) == ["b1"]
        assert await come("a4", 0) == ["a1"]
        assert await come("c0", -5) == ["b0"]
        assert admission.waiting == 3 and set(tasks) == {"a0", "a4", "c0"}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert not admission.waiting

    asyncio.run(run())


def test_a_place_for_one_that_leaves_is_the_next_ones() -> None:
    """Though it was its own already when it left."""

    async def run() -> None:
        admission = UpstreamQueue(known("a", places=1), WaitLimits())
        first = await admission.place(asked(), POOLS)
        tasks = [asyncio.create_task(admission.place(asked(), POOLS)) for _ in range(2)]
        await asyncio.sleep(0)
        first.end(True)
        tasks[0].cancel()
        lease = await asyncio.wait_for(tasks[1], 10)
        assert tasks[0].cancelled() and not admission.waiting and lease.upstream.requests == 1

    asyncio.run(run())


def test_how_fast_requests_are_answered_is_known_from_when_others_wait() -> None:
    """From the first seconds on; how many are asked meanwhile, or before, says nothing."""
    now = [0.0]
    answers = AnswerRate(lambda: now[0])

    def goes_on(seconds: int, rate: int) -> None:
        for _ in range(seconds * rate):
            now[0] += 1 / rate
            answers.answered()

    goes_on(600, 1)
    assert answers.rate == 0
    answers.waits(True)
    goes_on(2, 8)
    assert answers.rate == pytest.approx(8, rel=0.01)
    answers.waits(False)
    goes_on(600, 1)
    assert answers.rate == pytest.approx(8, rel=0.1)
    answers.waits(True)
    goes_on(120, 2)
    assert answers.rate == pytest.approx(2, rel=0.1)
    for _ in range(300):  # a line of one, which is empty when its place's last request has ended
        answers.waits(True)
        now[0] += 1
        answers.waits(False)
        answers.answered()
    assert answers.rate == pytest.approx(1, rel=0.1)
    answers.waits(True)
    now[0] += 600
    assert answers.rate < 0.01


def test_who_waits_in_vain_is_told_why() -> None:
    async def run() -> None:
        full = known("a", places=1)
        admission = UpstreamQueue(full, WaitLimits(1, 0.02))
        await admission.place(asked(), POOLS)
        with pytest.raises(NoUpstream, match="busy"):
            await admission.place(asked(), POOLS)
        with pytest.raises(UnknownModel, match="known models: m"):
            await admission.place(asked(model="n"), POOLS)
        waiting = asyncio.create_task(admission.place(asked(), POOLS))
        await asyncio.sleep(0)
        with pytest.raises(NoUpstream, match="1 requests wait already") as raised:
            await admission.place(asked(), POOLS)
        assert raised.value.retry_after >= 0.5
        waiting.cancel()
        gone = known("a")
        gone.down(gone.get("a"), "it is gone")
        with pytest.raises(NoUpstream, match="no upstream answered"):
            await UpstreamQueue(gone, WaitLimits(1, 0.02)).place(asked(), POOLS)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "timeout", "known"),
    [("/v1/completions", 2, True), ("/v1/chat/completions", 0.5, True), ("/v1/messages", 2, False),
     ("/v1/completions", 0, False), ("/v1/completions", 1e9, False),
     ("/v1/completions", "2", False), ("/v1/completions", None, False)],
)  # fmt: skip
def test_which_timeouts_of_clients_are_known(path: str, timeout: object, known: bool) -> None:
    """Those that servers keep; others they refuse, or do not look at."""
    assert asked(path, timeout=timeout).timeout == (timeout if known else None)
    assert asked(path).timeout is None


def test_nobody_waits_longer_than_its_client() -> None:
    """From its arrival; a server says the same then."""

    async def run() -> None:
        admission = UpstreamQueue(known("a", places=1), WaitLimits(4, 30))
        await admission.place(asked(), POOLS)
        for began in (time.monotonic(), time.monotonic() - 100):
            job = RelayJob(asked(timeout=0.05), {}, Dealt("m", Model()), Usage(began=began))
            with pytest.raises(DeadlineExceeded) as raised:
                async with asyncio.timeout(20):
                    await admission.place(job.asked, POOLS, (), job.due)
            assert (raised.value.status, admission.waiting) == (408, 0)
        admission.limits = WaitLimits(4, 0.02)
        job = RelayJob(asked(timeout=20), {}, Dealt("m", Model()), Usage())
        with pytest.raises(NoUpstream, match=r"busy for 0\.02 s"):
            await admission.place(job.asked, POOLS, (), job.due)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_octavos_servers_are_sent_what_is_left_of_a_timeout(own: bool, stream: bool) -> None:
    """Which counts in place of the client's own; others get the body as it is."""
    relayed = asked(prompt="}", timeout=20, stream=stream)
    job = RelayJob(relayed, {}, Dealt("m", Model()), Usage(), relayed.resume())
    upstream = Upstream(Place("http://a"), Breaker(time.monotonic), own=own)
    job.lease = SimpleNamespace(upstream=upstream)  # type: ignore[assignment]
    for passed, left in (0, 20), (3, 17), (100, MIN_TIMEOUT):  # as at the next server
        job.usage.began = time.monotonic() - passed
        found = msgspec.json.decode(job.body, type=CompletionBody)
        assert (found.prompt, found.stream) == ("}", stream)
        assert (found.resume is not None) == (own and stream)
        assert found.timeout == pytest.approx(left if own else 20, abs=0.5)


def test_pools_fall_back() -> None:
    async def run() -> None:
        upstreams = known("a")
        spare = upstreams.add(Place("http://b", "fallback"))
        upstreams.up(spare, {"m": ModelFigures()}, False)
        admission = UpstreamQueue(upstreams, WaitLimits(1, 0.02))
        assert (await admission.place(asked(), POOLS)).upstream.id == "a"
        upstreams.down(upstreams.get("a"), "it is gone")
        assert (await admission.place(asked(), POOLS)).upstream is spare

    asyncio.run(run())


def test_who_may_serve_a_model_is_asked_after_those_who_say_so() -> None:
    """One that does not say its models may have any."""
    upstreams = known("a")
    queue = UpstreamQueue(upstreams, WaitLimits())
    assert queue.candidates(asked(model="other"), POOLS) == []
    upstreams.up(upstreams.add(Place("http://b:1")), {ANY: ModelFigures()}, own=False)

    def chosen(model: str) -> str:
        lease = upstreams.choose(DEFAULT, model, Ask(1)).lease
        return "" if lease is None else lease.upstream.id

    def costs(model: str) -> list[str]:
        return [one.replica for one in upstreams.explain(DEFAULT, model, Ask(1))]

    assert (chosen("m"), chosen("other"), costs("m"), costs("x")) == (
        "a",
        "b:1",
        ["a", "b:1"],
        ["b:1"],
    )
    assert [up.id for up in queue.candidates(asked(model="other"), POOLS)] == ["b:1"]
    assert list(upstreams.models) == ["m"]
    one = upstreams.get("a")
    assert one is not None
    for _ in range(20):
        lease = upstreams.choose(DEFAULT, "m", Ask(1), {"b:1"}, broken=True).lease
        assert lease is not None
        lease.end(False)
    assert one.breaker.state == "open"
    assert chosen("m") == "b:1"  # rather than one that fails
    upstreams.down(one, "gone")
    assert chosen("m") == "b:1"
    assert (one.called("m"), one.called("x")) == ("m", "x")
    other = upstreams.get("b:1")
    assert other is not None and other.called("m") == ANY


def test_a_model_is_octavos_if_all_who_may_be_asked_are() -> None:
    """A gateway before this one would take what they can for granted."""
    upstreams = known("a")
    about = AboutGateway(upstreams, cast(Door, None))
    assert about._owner("m") == "octavo"
    upstreams.up(upstreams.add(Place("http://b:1")), {ANY: ModelFigures()}, own=False)
    assert about._owner("m") == "upstream"


def believed(upstreams: Upstreams, ask: Ask) -> dict[str, int]:
    """The tokens of a prompt that are thought to be in each upstream's cache."""
    return {one.replica: one.cost.cached for one in upstreams.explain(DEFAULT, "m", ask)}


def test_no_more_is_thought_to_be_cached_than_there_is_room_for() -> None:
    upstreams = Upstreams("random")
    for name, room in (("a", 3 * BLOCK_TOKENS + 5), ("b", 0)):
        upstreams.up(upstreams.add(Place(f"http://{name}")), {"m": ModelFigures(room)}, True)
    prompts = [Ask(2000, text_chain(bytes([i]) * 2 * PREFIX_BYTES, PREFIX_BYTES), BLOCK_TOKENS) for i in range(2)]  # fmt: skip
    for ask in prompts:
        for other in ("a", "b"):
            upstreams.choose(DEFAULT, "m", ask, {"a", "b"} - {other}).lease.end(True)
    assert believed(upstreams, prompts[0]) == {"a": BLOCK_TOKENS, "b": 2 * BLOCK_TOKENS}
    assert believed(upstreams, prompts[1]) == {"a": 2 * BLOCK_TOKENS, "b": 2 * BLOCK_TOKENS}


def test_nothing_is_thought_to_be_cached_after_a_restart() -> None:
    upstreams, ask = known("a", "b"), Ask(2000, text_chain(b"x" * PREFIX_BYTES, PREFIX_BYTES), BLOCK_TOKENS)  # fmt: skip
    for other in ("a", "b"):
        upstreams.choose(DEFAULT, "m", ask, {"a", "b"} - {other}).lease.end(True)
    for up in upstreams:
        upstreams.up(up, {"m": ModelFigures()}, True)  # as every probe says
    assert believed(upstreams, ask) == {"a": BLOCK_TOKENS, "b": BLOCK_TOKENS}
    upstreams.down(upstreams.get("a"), "it is gone")
    upstreams.up(upstreams.get("a"), {"m": ModelFigures()}, True)
    assert believed(upstreams, ask) == {"a": 0, "b": BLOCK_TOKENS}


def test_who_waits_for_one_pool_is_in_no_others_way() -> None:
    """A canary that is down holds nobody up who is served by the old version."""

    async def run() -> None:
        upstreams = known("a")
        canary = upstreams.add(Place("http://b", "next"))
        upstreams.up(canary, {"m": ModelFigures(), "n": ModelFigures()}, True)
        upstreams.down(canary, "it is gone")
        admission = UpstreamQueue(upstreams, WaitLimits())
        waiting = asyncio.create_task(admission.place(asked(), ("next", FALLBACK)))
        await asyncio.sleep(0)
        assert (await admission.place(asked(), POOLS)).upstream.id == "a"
        upstreams.up(canary, {"m": ModelFigures(), "n": ModelFigures()}, True)
        assert (await waiting).upstream is canary
        with pytest.raises(UnknownModel, match="pool 'default' serves 'n'; known models: m"):
            await admission.place(asked(model="n"), POOLS)

    asyncio.run(run())


def test_what_only_one_can_answer_goes_to_no_other_when_that_is_removed() -> None:
    """Who knows nothing of what it follows would answer as if there were nothing."""

    async def run() -> None:
        upstreams = known("a", "b", places=1)
        admission = UpstreamQueue(upstreams, WaitLimits())
        follows = msgspec.structs.replace(asked("/v1/responses"), keeper="a")
        assert (await admission.place(follows, POOLS)).upstream.id == "a"
        waiting = asyncio.create_task(admission.place(follows, POOLS))
        await asyncio.sleep(0)
        upstreams.remove(upstreams.get("a"))
        with pytest.raises(KeeperGone):
            await waiting
        with pytest.raises(KeeperGone):
            await admission.place(follows, POOLS, {"a"})
        assert admission.waiting == 0 == upstreams.get("b").requests

    asyncio.run(run())


def test_at_the_end_nobody_waits() -> None:
    async def run() -> None:
        admission = UpstreamQueue(known("a", places=1), WaitLimits())
        await admission.place(asked(), POOLS)
        waiting = [asyncio.create_task(admission.place(asked(), POOLS)) for _ in range(3)]
        await asyncio.sleep(0)
        admission.close()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(end) for end in ends] == [Overloaded] * 3 and not admission.waiting
        with pytest.raises(Overloaded, match="shutting down"):
            await admission.place(asked(), POOLS)

    asyncio.run(run())


def test_an_upstream_may_change_its_pool() -> None:
    upstreams = known("a")
    first = upstreams.choose("default", "m", asked().ask).lease
    upstreams.add(Place("http://a", "next", "key"))
    assert upstreams.choose("default", "m", asked().ask).known is False
    second = upstreams.choose("next", "m", asked().ask).lease
    assert first is not None and second is not None and first.upstream is second.upstream
    assert first.upstream.place.key == "key" and first.upstream.requests == 2


def test_who_was_removed_says_nothing_of_one_in_its_place() -> None:
    upstreams = known("a")
    lease = upstreams.choose("default", "m", asked().ask).lease
    assert lease is not None
    upstreams.remove(lease.upstream)
    new = upstreams.add(Place("http://a"))
    upstreams.up(new, {"m": ModelFigures()}, True)
    lease.end(False)
    found = upstreams.choose("default", "m", asked().ask).lease
    assert found is not None and found.upstream is new


def test_what_has_changed_counts_at_the_next_choice() -> None:
    upstreams = known("a", "b", "c")
    a, b, c = upstreams
    upstreams.remove(a)
    assert {one.replica for one in upstreams.explain("default", "m", asked().ask)} == {"b", "c"}
    upstreams.drain(c)
    found = upstreams.choose("default", "m", asked().ask).lease
    assert found is not None and found.upstream is b
    upstreams.configure("round-robin", 1)
    assert upstreams.choose("default", "m", asked().ask).lease is None  # it has its one request
    found.end(True)
    assert upstreams.choose("default", "m", asked().ask).lease is not None
    seen = {one.replica: one.state for one in upstreams.explain("default", "m", asked().ask)}
    assert seen == {"b": "full", "c": "draining"}


def test_leases_leave_nothing() -> None:
    upstreams = known("a", "b")
    leases = [upstreams.choose("default", "m", asked().ask).lease for _ in range(8)]
    assert [u.requests for u in upstreams] == [4, 4]
    for i, lease in enumerate(leases):
        assert lease is not None
        if i % 2:
            lease.first()
        lease.end([True, None, False][i % 3])
        lease.end(True)
    assert [(u.running, u.waiting, u.waiting_tokens) for u in upstreams] == [(0, 0, 0)] * 2


@settings(max_examples=25)
@given(st.integers(0, 1 << 30))
def test_simulated_engines_are_deterministic_and_finish(seed: int) -> None:
    def run() -> list[object]:
        drawn, engine = random.Random(seed), SimulatedEngine(Speed(slots=3, cache=256))
        wanted = {}
        for i in range(12):
            prompt, output = drawn.randrange(1, 600), drawn.randrange(1, 9)
            blocks = [hash((drawn.randrange(2), j)) for j in range(prompt // 16)]
            engine.submit(SimulatedRequest(str(i), prompt, output, blocks))
            wanted[str(i)] = output
        steps = []
        while engine.running or engine.waiting:
            steps.append(engine.step())
            assert engine.running <= 3
        given = [name for step in steps for name in step.tokens]
        assert {name: given.count(name) for name in wanted} == wanted
        kept = sum(len(s.stored) - len(s.removed) for s in steps)
        assert kept * 16 <= 256 and engine.prompt_tokens == 0
        return steps

    assert run() == run()


def test_a_simulated_prefix_is_computed_once() -> None:
    engine = SimulatedEngine(Speed(prefill=1000, step=0.01, chunk=10_000))
    blocks = list(range(100))
    seconds = []
    for name in ("a", "b"):
        engine.submit(SimulatedRequest(name, 1601, 1, blocks))
        seconds.append(engine.step().seconds)
    assert seconds == [pytest.approx(1.611), pytest.approx(0.011)]
