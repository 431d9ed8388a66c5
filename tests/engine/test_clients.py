"""Whoever computes tokens: a client that is none of ours drives generation and the Python API."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import octavo
from octavo.client.base import EngineClient
from octavo.client.in_process import InProcessClient
from octavo.engine.engine import Engine
from octavo.engine.events import Ended, Finish, Pooled, PromptLogprobs, Times, Token, TokenEvent
from octavo.engine.request import BeamSearch, Request, SamplingParams
from octavo.engine.stats import EngineStats
from octavo.errors import DeadlineExceeded, EngineFailed, InvalidValue, Overloaded, RequestError
from octavo.generate.choices import generate
from octavo.generate.load import load
from octavo.generate.model import ServedModel
from octavo.generate.prepare import encode_chat, prepare
from octavo.generate.reply import TextDelta, Usage
from octavo.generate.request import GenerationRequest, Sampling
from octavo.text.messages import Tool, message

PROMPTS = ["The capital of France is", "Once upon a time", "One, two, three,", "def main():"]
PARAMS = octavo.SamplingParams(temperature=0, max_tokens=12)
NAMES = list(EngineStats.__struct_fields__)


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Iterator[ServedModel]:
    model = load("smollm2", offline=True, context=512)
    yield model
    asyncio.run(model.close())


class Clients:
    """What clients have in common that compute nothing themselves."""

    def __init__(self) -> None:
        self.closed = False

    ready = True
    adapters: list[str] = []
    pid = None
    stats = dict.fromkeys(NAMES, 0)

    async def load_adapter(self, name: str, path: str) -> None:
        raise RequestError("no adapters here")

    async def unload_adapter(self, name: str) -> None:
        raise RequestError("no adapters here")

    async def close(self) -> None:
        self.closed = True


class Pool(Clients):
    """Gives its members requests by turns."""

    def __init__(self, members: list[EngineClient]) -> None:
        super().__init__()
        self.given: list[int] = []
        self._turns = cycle(enumerate(members))

    async def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        number, member = next(self._turns)
        self.given.append(number)
        async for event in member.submit(request):
            yield event


Script = Callable[[Request], AsyncGenerator[TokenEvent, None]]


class Scripted(Clients):
    """Says what it is told to."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.submit = script


def scripted(model: ServedModel, text: str, finish: Finish = "stop", **params: Any) -> Script:
    """The tokens of a text, each with its number as its log-probability, ended as `finish`."""

    async def script(request: Request) -> AsyncGenerator[TokenEvent, None]:
        ids = model.tokenizer.encode(text, add_bos=False)
        if request.params.prompt_logprobs is not None:
            yield PromptLogprobs(request.id, [(-1.0, [(7, -1.0)])] * (len(request.prompt) - 1), 3)
        for i, token in enumerate(ids):
            await asyncio.sleep(0)
            yield Token(request.id, token, -float(i), [(token, -float(i))], None, 3, Times(1, 2, 3, 4 + i))  # fmt: skip
        (end,) = [i for i in model.tokenizer.special.eos if model.tokenizer.name(i) == "<|im_end|>"]
        yield Token(request.id, end, -9.0, [], finish, 3, Times(1, 2, 3, 9))

    return script


def run(model: ServedModel, request: GenerationRequest) -> tuple[list[TextDelta], Usage]:
    async def work() -> tuple[list[TextDelta], Usage]:
        job = prepare(request, model)
        usage = Usage(prompt=job.prompt_tokens)
        return [delta async for delta in generate(job, usage)], usage

    return asyncio.run(work())


def test_scripted_events_become_text(model: ServedModel) -> None:
    script = replace(model, client=Scripted(scripted(model, "One, two. Three")))
    params = SamplingParams(logprobs=1, prompt_logprobs=1)
    deltas, usage = run(script, GenerationRequest(prompts=["a b c"], sampling=params))
    assert "".join(d.text for d in deltas) == "One, two. Three"
    ids = model.tokenizer.encode("One, two. Three", add_bos=False)
    shown = [(t.token, t.logprob, t.top) for d in deltas for t in d.tokens]
    assert shown == [(token, -float(i), [(token, -float(i))]) for i, token in enumerate(ids)]
    assert [d.finish for d in deltas if d.finish] == ["stop"] == usage.finishes
    assert [i for d in deltas for i in d.ids] == [*ids, deltas[-1].stop_token]
    prompt = model.tokenizer.encode("a b c")
    assert [(t.token, t.logprob) for t in deltas[0].prompt] == [
        (token, None if i == 0 else -1.0) for i, token in enumerate(prompt)
    ]
    assert (usage.prompt, usage.completion, usage.cached) == (len(prompt), len(ids) + 1, 3)
    assert (usage.queued, usage.first, usage.last) == (1, 3, 9)


def test_stop_strings_end_the_request(model: ServedModel) -> None:
    closed: list[str] = []
    inner = scripted(model, "One, two. Three")

    async def script(request: Request) -> AsyncGenerator[TokenEvent, None]:
        try:
            async for event in inner(request):
                yield event
        finally:
            closed.append(request.id)

    stopped = SamplingParams(stop=["o. T", "xyz"])
    got = octavo.LLM(replace(model, client=Scripted(script))).generate("a", stopped, progress=False)
    assert [(c.text, c.finish_reason) for c in got] == [("One, tw", "stop")] and len(closed) == 1


@pytest.mark.parametrize(
    ("finish", "kind", "param", "code"),
    [
        ("deadline", DeadlineExceeded, "timeout", "deadline_exceeded"),
        ("refused", RequestError, "response_format", "constraint_failed"),
        ("error", EngineFailed, None, "engine_error"),
    ],
)
def test_ends_are_errors(
    model: ServedModel, finish: Finish, kind: type[RequestError], param: str, code: str
) -> None:
    async def script(request: Request) -> AsyncGenerator[TokenEvent, None]:
        yield Token(request.id, 5)
        blame = ("grammar", "constraint_failed") if finish == "refused" else (None, None)
        yield Ended(request.id, finish, "why", 0, Times(), *blame)

    llm = octavo.LLM(replace(model, client=Scripted(script)))
    for call in (lambda: llm.generate("a", PARAMS), lambda: list(llm.stream("a", PARAMS))):
        with pytest.raises(kind) as failed:
            call()
        assert (failed.value.param, failed.value.code) == (param, code)


def test_an_unknown_adapter_runs_none_of_a_call(model: ServedModel) -> None:
    """It is the argument at fault, also when the engine is the first to know."""
    asked: list[str] = []

    async def script(request: Request) -> AsyncGenerator[TokenEvent, None]:
        asked.append(request.adapter)
        if request.adapter:
            raise RequestError("no adapter 'leaving'", "adapter", "model_not_found")
        yield Ended(request.id, "stop", None, 0, Times())

    client = Scripted(script)
    client.adapters = ["leaving"]
    llm = octavo.LLM(replace(model, client=client))
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate(["a", "b"], PARAMS, adapter=["", "x"], progress=False),
        lambda: llm.generate(["a", "b"], PARAMS, adapter=[""], progress=False),
        lambda: list(llm.stream("a", PARAMS, adapter="x")),
        lambda: llm.chat("a", PARAMS, adapter="x", progress=False),
        lambda: llm.chat("a", PARAMS, adapter="leaving", progress=False),
    ]
    for call in calls:
        with pytest.raises(RequestError, match="adapter") as refused:
            call()
        assert refused.value.param == "adapter"
    assert asked == ["leaving"]


def test_a_loaded_model_takes_no_options_of_loading(model: ServedModel) -> None:
    for kind in (octavo.LLM, octavo.AsyncLLM):
        with pytest.raises(TypeError, match="loaded already takes no context"):
            kind(model, context=64)


def test_a_client_that_refuses_or_gives_vectors(model: ServedModel) -> None:
    async def script(request: Request) -> AsyncGenerator[TokenEvent, None]:
        if not request.pool:
            raise Overloaded("not now", code="overloaded")
        yield Pooled(request.id, np.full(4, len(request.prompt), np.float32).tobytes())

    llm = octavo.LLM(replace(model, client=Scripted(script)))
    with pytest.raises(Overloaded, match="not now"):
        llm.generate(PROMPTS, PARAMS, progress=False)
    assert [v.shape for v in llm.embed(["a", "b c d e"])] == [(4,), (4,)]
    (one, two) = llm.rank("a", ["a", "b c d"])
    assert one == two == pytest.approx(1)  # parallel vectors
    assert llm.stats().running == 0


def test_stats_while_there_is_no_engine(model: ServedModel) -> None:
    """A supervised engine may be gone for a moment: its client knows its restarts only."""
    client = Clients()
    client.stats = {"restarts": 2}
    llm = octavo.LLM(replace(model, client=client))
    with pytest.raises(EngineFailed, match="no engine") as failed:
        llm.stats()
    assert failed.value.code == "engine_failed"


def test_documents_are_a_list(model: ServedModel) -> None:
    """A text would be one document a character."""
    llm = octavo.LLM(model)
    with pytest.raises(InvalidValue) as refused:
        llm.rank("query", "abc")
    assert refused.value.param == "documents"


def test_a_prediction_is_no_longer_than_a_reply_can_be(model: ServedModel) -> None:
    small = replace(model, context=9)
    ids = model.tokenizer.encode("a b c d e f g h i j k l m n", add_bos=False)
    asked = GenerationRequest(prompts=["a"], prediction="a b c d e f g h i j k l m n")
    assert prepare(asked, small).prediction == ids[:9] and len(ids) > 9


def test_beams_have_no_prediction(model: ServedModel) -> None:
    sampling = Sampling(temperature=0, beam=BeamSearch(width=2, n=2))
    asked = GenerationRequest(prompts=["a"], n=2, sampling=sampling, prediction="b")
    with pytest.raises(RequestError, match="exclude each other") as refused:
        prepare(asked, model)
    assert (refused.value.param, refused.value.code) == ("prediction", "unsupported_parameter")


def test_tools_are_checked_once(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chat, whatever becomes of it, and of a conversation that is only tokenized."""
    seen: list[str] = []

    class Name:
        @staticmethod
        def fullmatch(name: str) -> bool:
            seen.append(name)
            return True

    monkeypatch.setattr("octavo.generate.prepare.TOOL_NAME", Name)
    hi, tool = message("user", "hi"), Tool("f")
    prepare(GenerationRequest(messages=[hi], tools=[tool], tool_choice="none"), model)
    assert seen == ["f"]
    encode_chat(GenerationRequest(messages=[hi], tools=[tool]), model)
    assert seen == ["f", "f"]


def test_a_step_wakes_a_loop_once(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever number of requests it computed."""
    client = model.client
    assert isinstance(client, InProcessClient)

    async def read(request: Request) -> int:
        return len([event async for event in client.submit(request)])

    async def work() -> tuple[int, int, int]:
        loop, wakes = asyncio.get_running_loop(), []
        wake = loop.call_soon_threadsafe

        def counted(*args: Any, **kwargs: Any) -> Any:
            wakes.append(args)
            return wake(*args, **kwargs)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        before = client.stats["steps"]
        ids = model.tokenizer.encode(PROMPTS[1])
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        each = [read(Request(id=f"r{i}", prompt=ids, params=params)) for i in range(8)]
        events = sum(await asyncio.gather(*each))
        return events, client.stats["steps"] - before, len(wakes)

    events, steps, wakes = asyncio.run(work())
    assert events == 160 and wakes <= steps < events


def test_counts_are_read_without_waiting(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a step runs, and once the engine is closed."""
    other = load("smollm2", offline=True, context=512)
    client = other.client
    assert isinstance(client, InProcessClient)
    assert client.stats.keys() == {*NAMES, "restarts"} and client.stats["steps"] == 0
    running, go_on, step = threading.Event(), threading.Event(), Engine.step

    def slow(engine: Engine) -> list[TokenEvent]:
        running.set()
        assert go_on.wait(20)
        return step(engine)

    monkeypatch.setattr(Engine, "step", slow)

    async def read() -> list[dict[str, int]]:
        request = Request(id="a", prompt=[5] * 9, params=PARAMS)
        events = client.submit(request)
        first = asyncio.ensure_future(anext(events))
        assert await asyncio.to_thread(running.wait, 20)
        found = [client.stats]
        go_on.set()
        await first
        found.append(client.stats)
        await events.aclose()
        exact = await client.read_stats()
        await client.close()
        assert (exact.running, exact.waiting, exact.blocks_held) == (0, 0, 0)
        return [*found, client.stats]

    during, after, closed = asyncio.run(asyncio.wait_for(read(), 60))
    assert (during["steps"], during["waiting"], during["prompt_tokens"]) == (0, 1, 9)
    assert (after["waiting"], after["running"]) == (0, 1) and after["steps"] > 0
    assert closed == {"restarts": 0}
    with pytest.raises(EngineFailed, match="closed"):
        asyncio.run(client.read_stats())
    other.end_workers()


def test_a_refused_request_leaves_the_others(model: ServedModel) -> None:
    async def work() -> list[Any]:
        async def read(prompt: list[int]) -> list[TokenEvent]:
            request = Request(id=str(len(prompt)), prompt=prompt, params=PARAMS)
            return [event async for event in model.client.submit(request)]

        jobs: list[Awaitable[Any]] = [read([1] * 5), read([1] * 10_000), read([])]
        return await asyncio.gather(*jobs, return_exceptions=True)

    good, long, empty = asyncio.run(work())
    assert len(good) == 12
    assert isinstance(long, RequestError) and isinstance(empty, RequestError)
    assert model.client.stats["running"] == 0


def test_a_pool_of_two(model: ServedModel) -> None:
    """Two engines by turns give what one gives, and a request says nothing of which it was."""
    other = load("smollm2", offline=True, context=512)
    pool = Pool([model.client, other.client])
    with octavo.LLM(replace(model, client=pool)) as llm:
        alone = octavo.LLM(model).generate(PROMPTS, PARAMS, progress=False)
        got = llm.generate(PROMPTS, PARAMS, n=2, progress=False)
        assert [c.tokens for c in got[::2]] == [c.tokens for c in alone]
        assert pool.given == [0, 1] * len(PROMPTS)
        assert "".join(llm.stream(PROMPTS[0], PARAMS)) == alone[0].text
        (first,), (second,) = (llm.chat("Hi", PARAMS, progress=False) for _ in range(2))
        assert (first.text, first.tokens) == (second.text, second.tokens)
        assert np.array_equal(llm.embed("Hi"), llm.embed("Hi"))
    assert pool.closed
    asyncio.run(other.close())


def test_closing_from_many_threads(model: ServedModel) -> None:
    class Slow(Scripted):
        closes = 0

        async def close(self) -> None:
            self.closes += 1
            await asyncio.sleep(0.1 * self.closes)

    client = Slow(scripted(model, "a"))
    llm = octavo.LLM(replace(model, client=client))
    with ThreadPoolExecutor(4) as pool:
        for closing in [pool.submit(llm.close) for _ in range(4)]:
            closing.result(10)
    assert client.closes == 1
