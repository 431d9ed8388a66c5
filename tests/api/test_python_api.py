"""The Python API says what the server says: text, tool calls, thoughts and log-probabilities."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import octavo
from octavo.errors import EngineFailed, RequestError
from octavo.generate.load import load
from octavo.generate.request import ChatOptions
from tests.api.server import Server
from tests.api.test_thoughts import TEMPLATE
from tests.api.test_tools import ASK, TIME, WEATHER

PROMPTS = ["The capital of France is", "Once upon a time", "One, two, three,", "def main():"]
PARAMS = octavo.SamplingParams(temperature=0, max_tokens=12)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "size": {"enum": [1, 2, 3]}},
    "required": ["city", "size"], "additionalProperties": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[octavo.LLM]:
    with octavo.LLM("smollm2", offline=True, context=1024) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: octavo.LLM) -> list[list[int]]:
    return [llm.generate(p, PARAMS, progress=False)[0].tokens for p in PROMPTS]


def chat(server: Server, **body: Any) -> list[dict[str, Any]]:
    status, reply = server.post("/v1/chat/completions", {"model": "smollm2", **body})
    assert status == 200, reply
    return reply["choices"]  # type: ignore[no-any-return]


def said(choice: dict[str, Any]) -> tuple[str, list[tuple[str, str]], str, list[Any]]:
    """A choice over HTTP, but for what is drawn anew each time (ids of calls)."""
    message = choice["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]  # fmt: skip
    logprobs = choice["logprobs"]["content"] if choice["logprobs"] else []
    shown = [(t["logprob"], [a["logprob"] for a in t["top_logprobs"]]) for t in logprobs]
    return message["content"] or "", calls, choice["finish_reason"], shown


def mine(completion: octavo.Completion) -> tuple[str, list[tuple[str, str]], str, list[Any]]:
    tops = zip(completion.logprobs or [], completion.top_logprobs or [], strict=True)
    calls = [(c.name, c.arguments) for c in completion.tool_calls]
    shown = [(logprob, list(top.values())) for logprob, top in tops]
    return completion.text, calls, completion.finish_reason, shown


def test_chats_are_equal(llm: octavo.LLM, server: Server) -> None:
    params = octavo.SamplingParams(temperature=1, seed=7, max_tokens=20, logprobs=2)
    got = llm.chat(QUESTION, params, n=3, progress=False)
    expected = chat(
        server, messages=QUESTION, temperature=1, seed=7, max_tokens=20, n=3, logprobs=True,
        top_logprobs=2,
    )  # fmt: skip
    assert [mine(c) for c in got] == [said(c) for c in expected]
    assert len({c.text for c in got}) == 3 and len(got[0].logprobs or []) == len(got[0].tokens)


def test_conversations_are_read_alike(llm: octavo.LLM, server: Server) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi", "name": None},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello"}], "reasoning": "hm"},
        {"role": "user", "content": "?"}, {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "user", "content": [{"type": "text", "text": "Go "}, {"type": "text", "text": "on"}]},
    ]  # fmt: skip
    status, reply = server.post("/tokenize", {"model": "smollm2", "messages": messages})
    assert (status, llm.encode_chat(messages)) == (200, reply["tokens"])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])  # fmt: skip
def test_tool_calls_are_equal(llm: octavo.LLM, server: Server, choice: Any) -> None:
    params = octavo.SamplingParams(temperature=1.5, seed=1, max_tokens=200)
    tools: dict[str, Any] = {"tools": [WEATHER, TIME], "tool_choice": choice, "parallel_tool_calls": False}  # fmt: skip
    (got,) = llm.chat(ASK, params, progress=False, **tools)
    (expected,) = chat(server, messages=ASK, temperature=1.5, seed=1, max_tokens=200, **tools)
    assert mine(got) == said(expected)
    (call,) = got.tool_calls
    assert got.finish_reason == "tool_calls" and call.id.startswith("call_")
    tool = {"get_weather": WEATHER, "get_time": TIME}[call.name]
    jsonschema.validate(json.loads(call.arguments), tool["function"]["parameters"])
    # The message goes on in the conversation, with the call's result.
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 o'clock"}
    (after,) = llm.chat([*ASK, got.message, result], PARAMS, progress=False, tools=[WEATHER, TIME])
    messages = [*ASK, expected["message"], result | {"tool_call_id": expected["message"]["tool_calls"][0]["id"]}]  # fmt: skip
    (other,) = chat(server, messages=messages, temperature=0, max_tokens=12, tools=[WEATHER, TIME])
    assert mine(after) == said(other)


def test_response_formats_are_equal(llm: octavo.LLM, server: Server) -> None:
    params = octavo.SamplingParams(temperature=1.2, seed=3, max_tokens=100)
    (got,) = llm.chat(QUESTION, params, response_format=FORMAT, progress=False)
    (expected,) = chat(
        server, messages=QUESTION, temperature=1.2, seed=3, max_tokens=100, response_format=FORMAT
    )
    assert mine(got) == said(expected) and got.finish_reason == "stop"
    jsonschema.validate(json.loads(got.text), SCHEMA)


def test_prompt_logprobs_and_the_best_of_several(llm: octavo.LLM, server: Server) -> None:
    params = octavo.SamplingParams(temperature=1, seed=5, max_tokens=8, logprobs=1, prompt_logprobs=1)  # fmt: skip
    got = llm.generate(PROMPTS[0], params, n=2, best_of=4, progress=False)
    status, reply = server.post(
        "/v1/completions",
        {"model": "smollm2", "prompt": PROMPTS[0], "temperature": 1, "seed": 5, "max_tokens": 8,
         "logprobs": 1, "prompt_logprobs": 1, "n": 2, "best_of": 4, "return_token_ids": True},
    )  # fmt: skip
    assert status == 200
    assert [(c.text, c.logprobs) for c in got] == [
        (c["text"], c["logprobs"]["token_logprobs"]) for c in reply["choices"]
    ]
    assert [c.tokens for c in got] == [c["token_ids"] for c in reply["choices"]]
    scored = reply["choices"][0]["prompt_logprobs"]
    ids = llm.tokenizer.encode(PROMPTS[0])
    assert got[0].prompt_logprobs == [None] + [
        entry[str(token)]["logprob"] for entry, token in zip(scored[1:], ids[1:], strict=True)
    ]
    everyone = llm.generate(PROMPTS[0], params, n=4, progress=False)
    rank = {c.text: sum(c.logprobs or []) / len(c.tokens) for c in everyone}
    assert [c.text for c in got] == sorted(rank, key=lambda t: -rank[t])[:2]


def test_thoughts_come_apart(smollm2: Path) -> None:
    with octavo.LLM("smollm2", offline=True, context=512, chat_template=TEMPLATE) as llm:
        ends = llm.tokenizer.encode("</think>", add_bos=False)
        params = octavo.SamplingParams(
            temperature=1, seed=0, max_tokens=200, logit_bias=dict.fromkeys(ends, 100.0)
        )
        schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["one", "two"]}}}
        (got,) = llm.chat("2 + 2?", params, response_format=schema, progress=False)
        assert json.loads(got.text) in ("one", "two") and got.finish_reason == "stop"
        assert "</think>" not in got.reasoning
        free = octavo.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        (thinking,) = llm.chat("2 + 2?", free, progress=False)
        assert (thinking.text, thinking.finish_reason) == ("", "length") and thinking.reasoning
        deltas = list(llm.stream_chat("2 + 2?", free))
        assert "".join(d.reasoning for d in deltas) == thinking.reasoning
        off = {"enable_thinking": False}
        (plain,) = llm.chat("2 + 2?", free, chat_template_kwargs=off, progress=False)
        assert plain.text and not plain.reasoning
        with pytest.raises(RequestError, match="does not think"):
            llm.chat("2 + 2?", PARAMS, thinking_token_budget=5, progress=False)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": None}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "("}}}}, "response_format"),
        ({"response_format": FORMAT, "tools": [WEATHER], "tool_choice": "required"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"n": 0}, "n"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(llm: octavo.LLM, options: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        llm.chat(QUESTION, PARAMS, progress=False, **options)
    assert refused.value.param == field
    assert llm.stats().blocks_held == 0


def test_there_are_no_other_options(llm: octavo.LLM) -> None:
    """A name that is not known is a TypeError, as with any function."""
    other: dict[str, Any] = {"max_tokens": 5}
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_tokens'"):
        llm.chat("hi", PARAMS, progress=False, **other)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_tokens'"):
        list(llm.stream_chat("hi", PARAMS, **other))
    other = {"contxt": 4096}
    for kind in (octavo.LLM, octavo.AsyncLLM):
        with pytest.raises(TypeError, match="'contxt'; the options are memory, context"):
            kind("smollm2", offline=True, **other)


def test_none_means_the_default(llm: octavo.LLM) -> None:
    options: dict[str, Any] = dict.fromkeys(ChatOptions.__annotations__)
    (expected,) = llm.chat(QUESTION, PARAMS, progress=False)
    (got,) = llm.chat(QUESTION, PARAMS, progress=False, **options)
    assert (got.tokens, got.prompt_tokens) == (expected.tokens, expected.prompt_tokens)


TYPES: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    ("a", {"max_tokens": "5"}, {}, "max_tokens"), ("a", {"max_tokens": 5.0}, {}, "max_tokens"),
    ("a", {"stop": 5}, {}, "stop"), ("a", {"stop_token_ids": 5}, {}, "stop_token_ids"),
    ("a", {"logit_bias": [1]}, {}, "logit_bias"), ("a", {"logit_bias": {"a": 1}}, {}, "logit_bias"),
    ("a", {"bad_words": [5]}, {}, "bad_words"), ("a", {"thinking": "x"}, {}, "thinking"),
    ("a", {"grammar": 5}, {}, "grammar"), ("a", {"beam": 2}, {}, "beam"),
    ("a", {}, {"n": "2"}, "n"), ("a", {}, {"n": 1.5}, "n"), ("a", {}, {"best_of": "2"}, "best_of"),
    (["a", ["a"]], {}, {}, "prompts"), ([5], {}, {}, "prompts"), ([[True]], {}, {}, "prompts"),
    ([[1.0]], {}, {}, "prompts"),
]  # fmt: skip


@pytest.mark.parametrize(("prompts", "params", "options", "field"), TYPES, ids=str)
def test_types_are_checked_first(
    llm: octavo.LLM, prompts: Any, params: dict[str, Any], options: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate(prompts, octavo.SamplingParams(**params), progress=False, **options)
    assert (refused.value.param, refused.value.code) == (field, "invalid_value")
    assert llm.stats().blocks_held == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", 5), ("tools", [5]), ("tool_choice", 5), ("parallel_tool_calls", "no"),
        ("response_format", "json_object"), ("thinking_token_budget", "5"),
        ("chat_template_kwargs", "x"), ("add_generation_prompt", 1),
        ("continue_final_message", "yes"), ("adapter", 5),
    ],
)  # fmt: skip
def test_types_of_options_are_checked(llm: octavo.LLM, name: str, value: Any) -> None:
    options: Any = {name: value}
    with pytest.raises(RequestError) as refused:
        llm.chat(QUESTION, PARAMS, progress=False, **options)
    assert (refused.value.param, refused.value.code) == (name, "invalid_value")


def test_errors_name_the_arguments_of_the_call(llm: octavo.LLM) -> None:
    long = "word " * 2000
    bad = octavo.SamplingParams(max_tokens=5, grammar="start: (")
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: llm.generate(PROMPTS, bad, progress=False), "grammar"),
        (lambda: list(llm.stream("a", bad)), "grammar"),
        (lambda: llm.chat("a", bad, progress=False), "grammar"),
        (lambda: llm.embed(["a", long]), "texts"),
        (lambda: llm.rank(long, ["a"]), "query"),
        (lambda: llm.rank("a", ["b", long]), "documents"),
        (lambda: llm.rank("a", ["b", 5]), "documents"),  # type: ignore[list-item]
    ]
    for call, field in calls:
        with pytest.raises(RequestError) as refused:
            call()
        assert refused.value.param == field


def test_tasks_loops_and_threads_at_once(llm: octavo.LLM, alone: list[list[int]]) -> None:
    """Each gets what it gets alone, whichever loop and thread it asks from."""

    async def everything(shared: octavo.AsyncLLM) -> list[list[int]]:
        async def read(prompt: str) -> list[int]:
            text = "".join([piece async for piece in shared.stream(prompt, PARAMS)])
            return shared.tokenizer.encode(prompt + text)[len(shared.tokenizer.encode(prompt)) :]

        each = [shared.generate(p, PARAMS) for p in PROMPTS]
        found, *streamed = await asyncio.gather(
            shared.generate(PROMPTS, PARAMS), *map(read, PROMPTS), *each
        )
        assert streamed[: len(PROMPTS)] == [c.tokens for c in found]
        assert [c.tokens for (c,) in streamed[len(PROMPTS) :]] == [c.tokens for c in found]
        return [c.tokens for c in found]

    shared = octavo.AsyncLLM(llm.model)
    results: list[list[list[int]]] = []
    threads = [
        threading.Thread(target=lambda: results.append(asyncio.run(everything(shared))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    mixed = [c.tokens for c in llm.generate(PROMPTS, PARAMS, progress=False)]
    for thread in threads:
        thread.join(120)
    assert [mixed, *results] == [alone] * 4
    assert llm.stats().blocks_held == 0


def test_a_cancelled_task_ends_its_requests(llm: octavo.LLM, alone: list[list[int]]) -> None:
    async def work() -> None:
        shared = octavo.AsyncLLM(llm.model)
        long = octavo.SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
        task = asyncio.create_task(shared.generate(PROMPTS, long))
        while (await shared.stats()).running < len(PROMPTS):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stats = await shared.stats()
        assert (stats.running, stats.waiting, stats.blocks_held) == (0, 0, 0)
        assert [c.tokens for c in await shared.generate(PROMPTS, PARAMS)] == alone

    asyncio.run(work())


def test_a_loop_that_ends_leaves_nothing(llm: octavo.LLM) -> None:
    """Its requests are aborted, though nobody closed them."""
    loop, before = asyncio.new_event_loop(), llm.stats().generated_tokens
    long = octavo.SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
    stream = octavo.AsyncLLM(llm.model).stream(PROMPTS[0], long)
    loop.run_until_complete(anext(stream))
    assert llm.stats().running == 1
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    while llm.stats().running:  # until the next step of its request
        pass
    assert llm.stats().blocks_held == 0
    assert llm.stats().generated_tokens - before < 450


def test_an_interrupt_ends_the_call_and_no_more(llm: octavo.LLM, alone: list[list[int]]) -> None:
    long = octavo.SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)

    def interrupt() -> None:
        while not llm.stats().running:
            pass
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, long, progress=False)
    thread.join()
    assert [c.tokens for c in llm.generate(PROMPTS, PARAMS, progress=False)] == alone
    assert (llm.stats().running, llm.stats().blocks_held) == (0, 0)


def test_closing_ends_what_runs(smollm2: Path) -> None:
    async def work() -> None:
        async with octavo.AsyncLLM("smollm2", offline=True, context=512) as llm:
            long = octavo.SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
            stream = llm.stream(PROMPTS[0], long)
            assert await anext(stream)
            (chat,) = await llm.chat(QUESTION, PARAMS)
            assert chat.text.startswith("The capital of France is Paris")
        with pytest.raises(EngineFailed, match="closed"):
            async for _ in stream:
                pass
        with pytest.raises(EngineFailed, match="closed"):
            await llm.generate("x", PARAMS)

    asyncio.run(work())


def test_closing_while_grammars_compile(smollm2: Path) -> None:
    """Those who wait, in the checker or behind it, get the same error as those who come later."""
    words = [f"{i:06}" for i in range(9_000)]  # some seconds, but for the end

    async def work() -> None:
        llm = octavo.AsyncLLM("smollm2", offline=True, context=512)
        formats = [
            {"type": "json_schema", "json_schema": {"schema": {"enum": [*words, str(i)]}}}
            for i in range(6)
        ]
        tasks = [asyncio.create_task(llm.chat("Hi", PARAMS, response_format=f)) for f in formats]
        while not llm.model.grammars._threads._work_queue.qsize():
            await asyncio.sleep(0.001)
        await llm.close()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [getattr(e, "code", e) for e in ends] == ["engine_closed"] * 6

    asyncio.run(work())


def test_a_closed_model_encodes_no_chat(smollm2: Path) -> None:
    llm = octavo.LLM("smollm2", offline=True, context=512)
    assert llm.encode_chat("hi")
    llm.close()
    with pytest.raises(EngineFailed, match="closed"):
        llm.encode_chat("hi")
    assert llm.template is not None and not llm.template._workers._all


def test_who_closes_a_model_that_was_given(smollm2: Path) -> None:
    """The last reference to what wraps it does not; `close` does, for all of them."""
    model = load("smollm2", offline=True, context=512)
    one, two = octavo.LLM(model), octavo.LLM(model)
    assert one.generate(PROMPTS[0], PARAMS, progress=False)
    del one
    gc.collect()
    three = octavo.LLM(model)
    assert three.generate(PROMPTS[0], PARAMS, progress=False)
    two.close()
    for call in (
        lambda: three.generate("x", PARAMS, progress=False),
        lambda: three.encode_chat("x"),
    ):
        with pytest.raises(EngineFailed, match="closed"):
            call()
    three.close()
