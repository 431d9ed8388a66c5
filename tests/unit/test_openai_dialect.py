"""OpenAI's bodies as neutral requests, and neutral text as OpenAI's responses; nothing runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.checkpoint import open_checkpoint
from octavo.engine.request import BeamSearch, SamplingParams
from octavo.errors import ContextExceeded, InvalidValue, Overloaded, RequestError
from octavo.generate.prepare import PreparedRequest
from octavo.generate.reply import TextDelta, TokenInfo, Usage
from octavo.generate.request import GenerationRequest, NamedTool
from octavo.server.dialects.openai.embeddings import (
    EmbeddingBody,
    RerankBody,
    ScoreBody,
    inputs,
    rerank_pairs,
    rerank_reply,
    score_pairs,
)
from octavo.server.dialects.openai.errors import error_body
from octavo.server.dialects.openai.requests import (
    chat_request,
    completion_request,
    conversation_request,
    names,
)
from octavo.server.dialects.openai.responses import ResponseWriter
from octavo.server.dialects.openai.schemas import FIELDS, ChatBody, CompletionBody, TokenizeBody
from octavo.server.parsing import parse
from octavo.server.sizes import SizeBounds
from octavo.text import CallDelta, Tokenizer, load_tokenizer
from octavo.text.messages import Message, TextPart, Tool, ToolCall
from octavo.text.structure import Grammar, JsonSchema, Regex, Structure
from tests.unit.fake_models import fake_model

USER = {"role": "user", "content": "hi"}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}, "strict": True},
}


def body(kind: Any, **fields: Any) -> Any:
    return parse(msgspec.json.encode(fields), kind, FIELDS, lambda _: SizeBounds(1000, 1000))


def chat(**fields: Any) -> GenerationRequest:
    return chat_request(body(ChatBody, **{"messages": [USER], **fields}))


def completion(**fields: Any) -> GenerationRequest:
    return completion_request(body(CompletionBody, **{"prompt": "hi", **fields}))


# -- requests ---------------------------------------------------------------------------------


def test_a_bare_body_leaves_everything_to_the_model() -> None:
    assert chat() == GenerationRequest(messages=[Message("user", (TextPart("hi"),))], tools=[])
    request = completion()
    assert request.prompts == ["hi"] and request.messages is None
    assert request.sampling.max_tokens == 16  # as OpenAI's older endpoint has it
    assert completion(max_tokens=0).sampling.max_tokens == 0


def test_messages_and_tools() -> None:
    request = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "reasoning": "hm", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ],
        tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}},
        parallel_tool_calls=False,
    )  # fmt: skip
    assert request.messages == [
        Message("system", (TextPart("a"), TextPart("b"))),
        Message("assistant", (TextPart(""),), (ToolCall("f", {"x": 1}, "1"),), reasoning="hm"),
        Message("tool", (TextPart("2"),), tool_call_id="1"),
    ]
    assert request.tools == [Tool("f", None, {"type": "object"}, None, True)]
    assert request.tool_choice == NamedTool("f") and not request.parallel_tool_calls


def test_sampling_and_identity() -> None:
    request = chat(
        temperature=0.5, top_p=0.9, stop="x", logit_bias={"1": 2}, max_completion_tokens=7,
        logprobs=True, top_logprobs=3, n=2, timeout=5, priority=-1, cache_salt="s",
        thinking_token_budget=9, chat_template_kwargs={"a": 1},
    )  # fmt: skip
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.stop) == (0.5, 0.9, "x")
    assert (sampling.logit_bias, sampling.max_tokens, sampling.logprobs) == ({"1": 2}, 7, 3)
    assert (request.n, request.timeout, request.priority, request.cache_salt) == (2, 5, -1, "s")
    assert (request.thinking_budget, request.template_options) == (9, {"a": 1})
    assert chat(logprobs=True).sampling.logprobs == 0 and chat().sampling.logprobs is None


def test_beams() -> None:
    beam = completion(beam_width=4, n=2, length_penalty=0.5, early_stopping="never").sampling.beam
    assert beam == BeamSearch(width=4, n=2, length_penalty=0.5, early_stopping="never")
    assert chat(use_beam_search=True).sampling.beam == BeamSearch(width=1, n=1)
    assert chat(use_beam_search=False, n=2).sampling.beam is None


def test_where_a_reply_begins() -> None:
    assert (chat().add_generation_prompt, chat().continue_final_message) == (True, False)
    continued = chat(continue_final_message=True)
    assert (continued.add_generation_prompt, continued.continue_final_message) == (False, True)
    assert not chat(add_generation_prompt=False).add_generation_prompt
    made = conversation_request(body(TokenizeBody, messages=[USER], tools=[TOOL]))
    assert made.messages == chat().messages and [t.name for t in made.tools] == ["f"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonSchema({"type": "object"})),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}}, JsonSchema({"a": 1})),
        ({"structured_outputs": {"regex": "a+"}}, Regex("a+")),
        ({"structured_outputs": {"grammar": "start: /a/"}}, Grammar("start: /a/")),
        ({"structured_outputs": {"json": {"b": 2}}}, JsonSchema({"b": 2}, "structured_outputs")),
    ],
)  # fmt: skip
def test_constraints(fields: dict[str, Any], expected: Any) -> None:
    made = None if expected is None else Structure(expected)
    assert chat(**fields).structure == completion(**fields).structure == made


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 0}, "n"), ({"n": 129}, "n"), ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"beam_width": 2, "early_stopping": "later"}, "early_stopping"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_what_both_refuse(fields: dict[str, Any], field: str) -> None:
    for make in (chat, completion):
        with pytest.raises(InvalidValue) as refused:
            make(**fields)
        assert refused.value.param == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": []}, "messages"), ({"messages": [{"role": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [{"role": "user", "content": "a", "audio": {}}]}, "messages[0].audio"),
        ({"tools": [{"type": "x", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 1}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)  # fmt: skip
def test_what_chat_refuses(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat(**fields)
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": []}, "prompt"), ({"prompt": ["a", 1]}, "prompt"), ({"prompt": ["a"] * 129}, "prompt"),
        ({"best_of": 1, "n": 2}, "best_of"), ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "beam_width": 2}, "best_of"), ({"prompt": ["a"] * 65, "n": 2}, "n"),
    ],
)  # fmt: skip
def test_what_completions_refuse(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        completion(**fields)
    assert refused.value.param == field


def test_prompts() -> None:
    assert completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]]).prompts == [[1], [2, 3]]
    assert completion(prompt=["a", "b"], n=64).n == 64
    assert completion(prompt=["a"] * 65, n=2, use_beam_search=True).sampling.beam is not None


def test_names_of_fields() -> None:
    made = body(ChatBody, messages=[USER], structured_outputs={"regex": "a"})
    plain, text = body(ChatBody, messages=[USER]), body(CompletionBody, prompt="a")
    error = InvalidValue("structure is wrong", "structure")
    assert [error.renamed(names(b)).param for b in (made, plain, text)] == [
        "structured_outputs", "response_format", "response_format",
    ]  # fmt: skip
    assert str(error.renamed(names(made))) == "structured_outputs is wrong"
    options = InvalidValue("template_options.x cannot be given", "template_options.x")
    assert options.renamed(names(plain)).param == "chat_template_kwargs.x"
    long = ContextExceeded(10, 20, 5, "prompts")
    assert str(long.renamed(names(text))) == str(ContextExceeded(10, 20, 5, "prompt"))
    other = InvalidValue("top_k is wrong", "top_k")
    assert other.renamed(names(plain)) is other


# -- responses --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


def writer(tokenizer: Tokenizer, asked: Any, logprobs: int | None = None) -> ResponseWriter:
    job = PreparedRequest(
        model=fake_model(tokenizer, "m"), prompts=[[5, 6, 7]], n=2, made=2,
        params=SamplingParams(logprobs=logprobs),
    )  # fmt: skip
    return ResponseWriter(asked, job, Usage(prompt=3, completion=4))


def frames(data: bytes) -> list[Any]:
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
    return [line if line == b"[DONE]" else json.loads(line) for line in lines]


def test_a_chat_stream(tokenizer: Tokenizer) -> None:
    asked = body(
        ChatBody, messages=[USER], stream=True, stream_options={"include_usage": True}, n=2
    )
    made = writer(tokenizer, asked)
    assert made.stream and made.media_type.startswith("text/event-stream")
    opened = frames(made.opening())
    assert [c["choices"][0]["index"] for c in opened] == [0, 1]
    assert opened[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    (one,) = frames(made.chunks(TextDelta(1, "a", reasoning="b", ids=[8])))
    assert one["object"] == "chat.completion.chunk" and one["usage"] is None
    assert one["choices"][0]["delta"] == {"reasoning_content": "b", "content": "a"}
    first, second = frames(made.chunks(TextDelta(0, "z", finish="stop")))
    assert first["choices"][0]["finish_reason"] is None
    assert second["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    last, end = frames(made.closing())
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 7 and end == b"[DONE]"
    failed, end = frames(made.failure(Overloaded("busy", code="overloaded")))
    assert failed["error"]["code"] == "overloaded" and end == b"[DONE]"
    assert len({f["id"] for f in (*opened, one, first, second, last)}) == 1


def test_a_call_in_pieces_is_one_call(tokenizer: Tokenizer) -> None:
    deltas = [
        TextDelta(0, "", calls=[CallDelta(0, "id", "f", "")]),
        TextDelta(0, "", calls=[CallDelta(0, None, None, '{"x"')]),
        TextDelta(0, "", calls=[CallDelta(0, None, None, ":1}")], finish="tool_calls"),
    ]
    made = writer(tokenizer, body(ChatBody, messages=[USER], stream=True))
    calls = [
        c["choices"][0]["delta"]["tool_calls"][0]
        for d in deltas
        for c in frames(made.chunks(d))
        if c["choices"][0]["delta"]
    ]
    assert "".join(c["function"]["arguments"] for c in calls) == '{"x":1}'
    assert [c.get("id") for c in calls] == ["id", None, None]
    whole = writer(tokenizer, body(ChatBody, messages=[USER]))
    (choice,) = json.loads(whole.whole([deltas, []]))["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        {"id": "id", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    ]


def test_completions_and_their_log_probabilities(tokenizer: Tokenizer) -> None:
    hello, world = tokenizer.encode("Hello world", add_bos=False)
    deltas = [
        TextDelta(
            0, "Hello", [TokenInfo(hello, -0.5, [(hello, -0.5), (world, -1.0)])], ids=[hello]
        ),
        TextDelta(0, " world", [TokenInfo(world, -0.25, [])], "length", ids=[world]),
    ]
    asked = body(CompletionBody, prompt="a", logprobs=2, return_token_ids=True)
    made = writer(tokenizer, asked, 2)
    assert not made.stream and made.opening() == b""
    (choice,) = json.loads(made.whole([deltas]))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello world", "length")
    assert choice["token_ids"] == [hello, world] and choice["prompt_token_ids"] == [5, 6, 7]
    assert choice["logprobs"] == {
        "tokens": ["Hello", " world"], "token_logprobs": [-0.5, -0.25], "text_offset": [0, 5],
        "top_logprobs": [{"Hello": -0.5, " world": -1.0}, {" world": -0.25}],
    }  # fmt: skip
    streamed = writer(tokenizer, asked, 2)
    offsets = [c["choices"][0]["logprobs"] for d in deltas for c in frames(streamed.chunks(d))]
    assert [o["text_offset"] for o in offsets if o] == [[0], [5]]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (404, "not_found_error"),
     (409, "invalid_request_error"), (500, "server_error"), (503, "service_unavailable")],
)  # fmt: skip
def test_errors(status: int, kind: str) -> None:
    error = RequestError("why", "field", "code")
    error.status = status
    expected = {"message": "why", "type": kind, "param": "field", "code": "code"}
    assert json.loads(error_body(error)) == {"error": expected}


# -- vectors ----------------------------------------------------------------------------------


def test_inputs_and_pairs() -> None:
    assert inputs(body(EmbeddingBody, input="a")) == ["a"]
    assert inputs(body(EmbeddingBody, input=[1, 2])) == [[1, 2]]
    assert inputs(body(EmbeddingBody, input=["a", [1]])) == ["a", [1]]
    for wrong in ([], [""], [[]], ["a", 1], ["a"] * 2049):
        with pytest.raises(InvalidValue, match="input takes 1 to 2048"):
            inputs(body(EmbeddingBody, input=wrong))
    assert score_pairs(body(ScoreBody, text_1="a", text_2=["b", "c"])) == [("a", "b"), ("a", "c")]
    assert score_pairs(body(ScoreBody, text_1=["a", "b"], text_2=["c", "d"])) == [
        ("a", "c"),
        ("b", "d"),
    ]
    with pytest.raises(InvalidValue, match="text_1 is one text"):
        score_pairs(body(ScoreBody, text_1=["a", "b"], text_2=["c"]))
    asked = body(RerankBody, query="q", documents=["a", {"text": "b"}])
    assert rerank_pairs(asked) == [("q", "a"), ("q", "b")]
    with pytest.raises(InvalidValue, match="top_n is 0"):
        rerank_pairs(body(RerankBody, query="q", documents=["a"], top_n=0))


def test_ranking_keeps_the_order_of_equals(tokenizer: Tokenizer) -> None:
    asked = body(RerankBody, query="q", documents=["a", "b", "c"], top_n=2, return_documents=True)
    reply = json.loads(rerank_reply(asked, fake_model(tokenizer, "m"), [0.5, 0.9, 0.5], 9))
    assert [(r["index"], r["document"]["text"]) for r in reply["results"]] == [(1, "b"), (0, "a")]
    assert reply["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
