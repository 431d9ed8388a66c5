"""What bodies of each dialect ask for, their errors, keys and ends; no engine runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.checkpoint import open_checkpoint
from octavo.engine.events import Ended
from octavo.errors import RequestError
from octavo.generate.request import GenerationRequest, NamedTool
from octavo.server.dialects import anthropic, ollama, openai
from octavo.server.dialects.anthropic.requests import messages_request
from octavo.server.dialects.anthropic.schemas import MessagesBody
from octavo.server.dialects.ollama import requests as ollama_requests
from octavo.server.dialects.ollama.schemas import ChatBody as OllamaBody
from octavo.server.dialects.openai.items import ResponsesBody, responses_request
from octavo.server.dialects.openai.requests import chat_request
from octavo.server.dialects.openai.schemas import ChatBody
from octavo.server.guard import Access
from octavo.server.parsing import parse
from octavo.server.sizes import SizeBounds
from octavo.text import Tokenizer, load_tokenizer
from octavo.text.messages import ImagePart, TextPart
from octavo.text.structure import JsonSchema, Structure
from tests.unit.dialects import events, scripted, speaking
from tests.unit.fake_models import Listener, ScriptedClient

SCHEMA = {"type": "object", "properties": {"n": {"type": "number"}}}
HI = [{"role": "user", "content": "hi"}]


def body(kind: Any, dialect: Any, **fields: Any) -> Any:
    return parse(
        msgspec.json.encode(fields), kind, dialect.fields, lambda _: SizeBounds(1000, 1000)
    )


def of_anthropic(**fields: Any) -> GenerationRequest:
    given = {"messages": HI, "max_tokens": 9} | fields
    return messages_request(body(MessagesBody, anthropic.DIALECT, **given))


def of_ollama(**fields: Any) -> GenerationRequest:
    given = {"messages": HI} | fields
    return ollama_requests.chat_request(body(OllamaBody, ollama.DIALECT, **given))


def of_openai(**fields: Any) -> GenerationRequest:
    return chat_request(body(ChatBody, openai.DIALECT, **{"messages": HI} | fields))


def of_responses(**fields: Any) -> GenerationRequest:
    given = body(ResponsesBody, openai.RESPONSES, **{"input": "hi"} | fields)
    return responses_request(given, [])


def test_one_conversation_in_four_dialects() -> None:
    """System, question, thoughts, text and a call, its result, and a question again."""
    call = {"name": "get", "arguments": '{"n": 1}'}
    parameters = {"description": "d", "parameters": SCHEMA, "strict": True}
    first = of_openai(
        messages=[
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."},
            {"role": "assistant", "content": "So:", "reasoning_content": "Hm.",
             "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
            {"role": "user", "content": "And?"},
        ],
        tools=[{"type": "function", "function": {"name": "get", **parameters}}],
    )  # fmt: skip
    second = of_anthropic(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "So:"},
                {"type": "tool_use", "id": "c1", "name": "get", "input": {"n": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]},
                {"type": "text", "text": "And?"}]},
        ],
        tools=[{"name": "get", "description": "d", "input_schema": SCHEMA, "strict": True}],
    )  # fmt: skip
    third = of_ollama(
        messages=[
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."},
            {"role": "assistant", "content": "So:", "thinking": "Hm.",
             "tool_calls": [{"id": "c1", "function": {"name": "get", "arguments": {"n": 1}}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
            {"role": "user", "content": "And?"},
        ],
        tools=[{"type": "function", "function": {"name": "get", **parameters}}],
    )  # fmt: skip
    fourth = of_responses(
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Go."}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "id": "m", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "So:", "annotations": [], "logprobs": []}]},
            {"type": "function_call", "call_id": "c1", "name": "get", "arguments": '{"n": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
            {"role": "user", "content": "And?"},
        ],
        tools=[{"type": "function", "name": "get", **parameters}],
    )  # fmt: skip
    for other in (second, third, fourth):
        assert (other.messages, other.tools) == (first.messages, first.tools)
        assert (other.tool_choice, other.parallel_tool_calls) == ("auto", True)
        assert (other.add_generation_prompt, other.continue_final_message) == (True, False)


def test_pictures() -> None:
    """They come to the reader of pictures under the field that held them."""
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    shown = [{"type": "text", "text": "See:"}, {"type": "image", "source": source}]
    (said,) = of_anthropic(messages=[{"role": "user", "content": shown}]).messages or ()
    url = "data:image/png;base64,aGk="
    assert said.content == (TextPart("See:"), ImagePart(url, "messages[0].content[1].source"))
    by_url = [{"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}]
    (said,) = of_anthropic(messages=[{"role": "user", "content": by_url}]).messages or ()
    assert [p.source for p in said.media] == ["https://a.example/b.png"]
    (said,) = (
        of_ollama(messages=[{"role": "user", "content": "See:", "images": ["aGk="]}]).messages or ()
    )
    assert said.content == (TextPart("See:"), ImagePart(url, "messages[0].images[0]"))


def test_what_else_anthropic_asks_for() -> None:
    said = [*HI, {"role": "assistant", "content": "It is"}]
    assert of_anthropic(messages=said).continue_final_message
    tools = [{"name": "f", "input_schema": {}}]
    for choice, expected in (
        ({"type": "any"}, "required"), ({"type": "none"}, "none"), ({"type": "auto"}, "auto"),
        ({"type": "tool", "name": "f"}, NamedTool("f")),
    ):  # fmt: skip
        assert of_anthropic(tools=tools, tool_choice=choice).tool_choice == expected
    single = {"type": "auto", "disable_parallel_tool_use": True}
    assert not of_anthropic(tools=tools, tool_choice=single).parallel_tool_calls
    thinking = of_anthropic(max_tokens=50, thinking={"type": "enabled", "budget_tokens": 20})
    assert thinking.thinking_budget == 20 and thinking.template_options == {"enable_thinking": True}
    assert of_anthropic(thinking={"type": "disabled"}) == of_anthropic()
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    made = Structure(JsonSchema(SCHEMA, "output_config.format"))
    assert of_anthropic(output_config=form).structure == made


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"max_tokens": 0}, "max_tokens"), ({"messages": []}, "messages"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"system": [{"type": "text", "text": "x", "colour": 1}]}, "system[0].colour"),
    ],
)  # fmt: skip
def test_what_anthropics_dialect_refuses(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(RequestError) as refused:
        of_anthropic(**fields)
    assert refused.value.param == path and path in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": [{"role": "assistant", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages[0].tool_calls"),
        ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"options": {"mirostat": 2}}, "options.mirostat"), ({"options": {"warp": 1}}, "options.warp"),
        ({"format": "xml"}, "format"), ({"think": "hard"}, "think"),
    ],
)  # fmt: skip
def test_what_ollamas_dialect_refuses(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(RequestError) as refused:
        of_ollama(**fields)
    assert refused.value.param == path and path in str(refused.value)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Listener]:
    access = Access(api_keys=("key",))
    with speaking(scripted(tokenizer, "ann", "Once upon", context=64), access=access) as one:
        yield one


KEY = {"x-api-key": "key"}
ASKED = {"messages": HI, "max_tokens": 9}


def test_keys_and_the_forms_of_errors(server: Listener) -> None:
    status, reply = server.json("/v1/messages", ASKED)
    assert (status, reply["type"], reply["error"]["type"]) == (401, "error", "authentication_error")
    assert server.ask("/v1/messages", ASKED, **KEY)[0] == 200
    assert server.ask("/v1/messages", ASKED, authorization="Bearer key")[0] == 200
    both = server.ask("/v1/messages", ASKED, **{"authorization": "Bearer no", "x-api-key": "key"})
    assert both[0] == 401
    status, reply = server.json("/v1/messages", ASKED | {"model": "bob"}, **KEY)
    assert (status, reply["error"]["type"]) == (404, "not_found_error")
    status, reply = server.json("/api/chat", {"messages": HI, "model": "bob"}, **KEY)
    assert status == 404 and reply == {"error": "no model 'bob' here; this server has 'ann'"}
    assert server.ask("/api/version", None, **KEY)[0] == 200
    assert server.ask("/", None, **KEY) == (200, "Ollama is running")
    assert server.json("/nowhere", None, **KEY)[0] == 404  # the root is no prefix


def test_ollamas_seed_below_zero_is_drawn(server: Listener) -> None:
    client = server.models.entry("ann").client
    assert isinstance(client, ScriptedClient)
    for seed in (-1, -1, 7, 7):
        server.ask("/api/chat", {"messages": HI, "options": {"seed": seed}}, **KEY)
    one, two, *same = [r.params.seed for r in client.requests[-4:]]
    assert one != two and same == [7, 7]


def test_limits_beyond_the_context(server: Listener) -> None:
    """Anthropic's and Ollama's clients name limits that no context has; the engine is told none."""
    client = server.models.entry("ann").client
    assert isinstance(client, ScriptedClient)
    server.ask("/v1/messages", ASKED | {"max_tokens": 9999}, **KEY)
    server.ask("/api/chat", {"messages": HI, "options": {"num_predict": 9999}}, **KEY)
    assert [r.params.max_tokens for r in client.requests[-2:]] == [None, None]
    body = {"messages": HI, "max_tokens": 9999}
    assert server.json("/v1/chat/completions", body, **KEY)[1]["error"]["code"] == (
        "context_length_exceeded"
    )
    long = [{"role": "user", "content": "word " * 70}]
    status, reply = server.json("/v1/messages", {"messages": long, "max_tokens": 1}, **KEY)
    assert status == 400 and "maximum context length is 64 tokens" in reply["error"]["message"]


def test_how_messages_end(tokenizer: Tokenizer) -> None:
    ends = []
    for finish, limit in (("stop", 9), ("length", 2), ("length", 9)):
        with speaking(scripted(tokenizer, "ann", "Once upon", finish)) as one:
            for stop in ([], ["ce up"]):
                body = {"messages": HI, "max_tokens": limit, "stop_sequences": stop}
                reply = one.json("/v1/messages", body)[1]
                last = events(one.ask("/v1/messages", body | {"stream": True})[1])[-2][1]
                assert last["delta"] == {k: reply[k] for k in ("stop_reason", "stop_sequence")}
                assert last["usage"] == reply["usage"]
                ends.append((reply["stop_reason"], reply["stop_sequence"]))
    stopped = ("stop_sequence", "ce up")
    assert ends == [
        ("end_turn", None), stopped, ("max_tokens", None), stopped,
        ("model_context_window_exceeded", None), stopped,
    ]  # fmt: skip


def test_streams_that_fail(tokenizer: Tokenizer) -> None:
    model = scripted(tokenizer, "ann", "Once")
    client = ScriptedClient(tokenizer.encode("Once", add_bos=False), Ended("", "error"))
    with speaking(replace(model, client=client)) as one:
        told = events(one.ask("/v1/messages", ASKED | {"stream": True})[1])
        assert told[-1][1]["error"]["type"] == "api_error"
        lines = one.ask("/api/chat", {"messages": HI})[1].splitlines()
        assert json.loads(lines[-1]) == {"error": "the engine could not compute this request"}
        assert [e.status for e in one.exchanges] == [500, 500]
