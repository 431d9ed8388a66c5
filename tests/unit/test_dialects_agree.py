"""One reply in every dialect, streamed and whole: the same text, thoughts, calls and end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoint import open_checkpoint
from octavo.generate.reply import call_arguments
from octavo.text import Tokenizer, load_tokenizer
from tests.api.test_forced import TEXTS
from tests.unit.dialects import Reply, events, scripted, speaking
from tests.unit.fake_models import Listener, ScriptedClient

HI = [{"role": "user", "content": "Say it."}]
CALL = '<tool_call>\n{"name": "get", "arguments": %s}\n</tool_call>'
ARGUMENTS = {"city": 'São "Paulo" 日本 {x} ]', "n": [1, {"a": None}], "s": "</tool_call> \\ \n"}
SCRIPTS = {
    **TEXTS,
    "calls": "Let me see.\n"
    + CALL % json.dumps(ARGUMENTS, ensure_ascii=False)
    + "\n"
    + CALL % "{}",
    "near": "a < b and <tool_call> not json",
    "thoughts": "<think>\nHm, 日本?\n</think>\n\nYes.",
    "everything": "<think>\nHm.\n</think>\n\nSo:\n" + CALL % '{"a": 1}',
}
TOOL = {"name": "get", "parameters": {"type": "object"}}
FINISHES = {
    "stop": "stop", "end_turn": "stop", "stop_sequence": "stop", "length": "length",
    "max_tokens": "length", "tool_calls": "calls", "tool_use": "calls", "completed": "stop",
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Listener]:
    with speaking(scripted(tokenizer, "ann", "")) as one:
        yield one


def openai(server: Listener, stream: bool, stop: list[str]) -> Reply:
    tools = [{"type": "function", "function": TOOL}]
    body = {"messages": HI, "tools": tools, "stream": stream, "stop": stop}
    status, text = server.ask("/v1/chat/completions", body)
    assert status == 200, text
    if not stream:
        (choice,) = json.loads(text)["choices"]
        message = choice["message"]
        calls = [c["function"] for c in message.get("tool_calls", ())]
        return Reply(
            message["content"] or "", message.get("reasoning_content", ""),
            [(c["name"], json.loads(c["arguments"])) for c in calls], FINISHES[choice["finish_reason"]],
        )  # fmt: skip
    out, calls = Reply(), []
    for line in text.split("\n\n")[:-2]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        delta = choice["delta"]
        out.text += delta.get("content") or ""
        out.thoughts += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[-1][1] += call["function"]["arguments"]
        out.finish = FINISHES.get(choice["finish_reason"], out.finish)
    out.calls = [(name, json.loads(arguments)) for name, arguments in calls]
    return out


def _message(content: list[Any], reason: str) -> Reply:
    return Reply(
        "".join(b["text"] for b in content if b["type"] == "text"),
        "".join(b["thinking"] for b in content if b["type"] == "thinking"),
        [(b["name"], b["input"]) for b in content if b["type"] == "tool_use"],
        FINISHES[reason],
    )


def anthropic(server: Listener, stream: bool, stop: list[str]) -> Reply:
    tools = [{"name": "get", "input_schema": {"type": "object"}}]
    body = {
        "messages": HI, "tools": tools, "stream": stream, "stop_sequences": stop, "max_tokens": 4000,
        "thinking": {"type": "adaptive"},
    }  # fmt: skip
    status, text = server.ask("/v1/messages", body)
    assert status == 200, text
    if not stream:
        message = json.loads(text)
        return _message(message["content"], message["stop_reason"])
    content: list[Any] = []
    reason, open_blocks = "", 0
    for kind, event in events(text):
        if kind == "content_block_start":
            assert event["index"] == len(content) and not open_blocks
            content.append(event["content_block"] | {"partial": ""})
            open_blocks += 1
        elif kind == "content_block_delta":
            delta, block = event["delta"], content[event["index"]]
            match delta["type"]:
                case "text_delta":
                    block["text"] += delta["text"]
                case "thinking_delta":
                    block["thinking"] += delta["thinking"]
                case _:
                    block["partial"] += delta["partial_json"]
        elif kind == "content_block_stop":
            open_blocks -= 1
            block = content[event["index"]]
            block["input"] = json.loads(block["partial"] or "{}")
        elif kind == "message_delta":
            reason = event["delta"]["stop_reason"]
    assert [kind for kind, _ in events(text)][-2:] == ["message_delta", "message_stop"]
    return _message(content, reason)


def ollama(server: Listener, stream: bool, stop: list[str]) -> Reply:
    tools = [{"type": "function", "function": TOOL}]
    body = {"messages": HI, "tools": tools, "stream": stream, "options": {"stop": stop}}
    status, text = server.ask("/api/chat", body)
    assert status == 200, text
    lines = [json.loads(line) for line in text.split("\n") if line]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert len(lines) == 1 or stream
    said = [line["message"] for line in lines]
    calls = [c["function"] for m in said for c in m.get("tool_calls", ())]
    return Reply(
        "".join(m["content"] for m in said), "".join(m.get("thinking", "") for m in said),
        [(c["name"], c["arguments"]) for c in calls],
        "calls" if calls else FINISHES[lines[-1]["done_reason"]],
    )  # fmt: skip


def responses(server: Listener, stream: bool, stop: list[str]) -> Reply:
    body = {"input": HI, "tools": [TOOL | {"type": "function"}], "stream": stream}
    status, text = server.ask("/v1/responses", body)
    assert status == 200, text
    if not stream:
        return _items(json.loads(text))
    told = events(text)
    assert [e["sequence_number"] for _, e in told] == list(range(len(told)))
    pieces: dict[str, str] = {}
    for kind, event in told:
        if kind.endswith(".delta"):
            pieces[event["item_id"]] = pieces.get(event["item_id"], "") + event["delta"]
    made = told[-1][1]["response"]
    for item in made["output"]:
        whole = (
            item.get("arguments") if item["type"] == "function_call" else item["content"][0]["text"]
        )
        assert pieces.get(item["id"], "") == whole
    return _items(made)


def _items(made: Any) -> Reply:
    said: dict[str, str] = {}
    calls = []
    for item in made["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], json.loads(item["arguments"])))
        else:
            (part,) = item["content"]
            said[part["type"]] = said.get(part["type"], "") + part["text"]
    finish = "calls" if calls else FINISHES[made["status"]]
    return Reply(said.get("output_text", ""), said.get("reasoning_text", ""), calls, finish)


def llama_cpp(server: Listener, stream: bool, stop: list[str]) -> Reply:
    """It knows neither thoughts nor calls: only for replies that have none."""
    _, prompt = server.json("/apply-template", {"messages": HI})
    body = {**prompt, "stream": stream, "stop": stop}
    status, text = server.ask("/completion", body)
    assert status == 200, text
    if not stream:
        made = json.loads(text)
        return Reply(made["content"], finish=STOPS[made["stop_type"]])
    parts = [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n")[:-1]]
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    return Reply("".join(p["content"] for p in parts), finish=STOPS[parts[-1]["stop_type"]])


DIALECTS: dict[str, Callable[[Listener, bool, list[str]], Reply]] = {
    "openai": openai, "anthropic": anthropic, "ollama": ollama,
}  # fmt: skip
PLAIN = (*DIALECTS.values(), llama_cpp)  # where all that is said is text
STOPS = {"eos": "stop", "word": "stop", "limit": "length"}


def say(server: Listener, tokenizer: Tokenizer, text: str) -> None:
    client = server.models.entry("ann").client
    assert isinstance(client, ScriptedClient)
    client.tokens = tokenizer.encode(text, add_bos=False)


def replies(server: Listener) -> list[Reply]:
    """Every dialect's that knows thoughts and calls."""
    asked = [*DIALECTS.values(), responses]
    return [ask(server, stream, []) for ask in asked for stream in (False, True)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_they_say_the_same(server: Listener, tokenizer: Tokenizer, name: str) -> None:
    say(server, tokenizer, SCRIPTS[name])
    expected, *others = replies(server)
    assert others == [expected] * len(others)
    if name in TEXTS:
        assert expected == Reply(TEXTS[name], finish="stop")
        assert [llama_cpp(server, stream, []) for stream in (False, True)] == [expected] * 2


def test_what_a_script_holds(server: Listener, tokenizer: Tokenizer) -> None:
    say(server, tokenizer, SCRIPTS["calls"])
    assert openai(server, False, []) == Reply(
        "Let me see.", "", [("get", ARGUMENTS), ("get", {})], "calls"
    )
    say(server, tokenizer, SCRIPTS["everything"])
    assert anthropic(server, True, []) == Reply("So:", "\nHm.", [("get", {"a": 1})], "calls")


@pytest.mark.parametrize("text", ["aaSTOPbb", "日本STOP語é"])
def test_stop_strings(server: Listener, tokenizer: Tokenizer, text: str) -> None:
    say(server, tokenizer, text)
    for i in range(len(text)):
        for stop in ([text[i : i + 2]], [text[i], text[i : i + 3]]):
            at = min(text.find(s) for s in stop)
            made = [ask(server, stream, stop) for ask in PLAIN for stream in (False, True)]
            assert made == [Reply(text[:at], finish="stop")] * 2 * len(PLAIN)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_response_tells_the_log_probabilities_of_its_text_alone(
    server: Listener, tokenizer: Tokenizer, name: str
) -> None:
    say(server, tokenizer, SCRIPTS[name])
    body = {"input": HI, "tools": [TOOL | {"type": "function"}],
            "include": ["message.output_text.logprobs"]}  # fmt: skip
    _, made = server.json("/v1/responses", body)
    texts = [item["content"][0] for item in made["output"] if item["type"] == "message"]
    for part in texts:
        told = b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode()
        assert told.strip() == part["text"].strip()


def test_a_response_that_ended_within_a_call_is_continued(
    server: Listener, tokenizer: Tokenizer
) -> None:
    """Errors name the arguments of a body as that body has them, whatever was said before."""
    say(server, tokenizer, (CALL % '{"city": "Paris"}').partition("Par")[0])
    tools = {"tools": [TOOL | {"type": "function"}]}
    _, cut = server.json("/v1/responses", {"input": HI, **tools})
    (call,) = cut["output"]
    assert call["arguments"].startswith('{"city":') and "}" not in call["arguments"]
    after = {"previous_response_id": cut["id"], **tools}
    assert server.ask("/v1/responses", {"input": "Go on.", **after})[0] == 200
    wrong = {"type": "function_call", "call_id": "c", "name": "get", "arguments": "no"}
    status, told = server.json("/v1/responses", {"input": [wrong], **after})
    assert (status, told["error"]["param"]) == (400, "input[0].arguments")
    assert told["error"]["message"] == "input[0].arguments is not a JSON object"


@pytest.mark.parametrize("text", ['{"city": ', "[1]", '{"a": ' * 5000, '{"a": ' + "[" * 5000])
def test_arguments_that_a_reply_ended_within_are_none(text: str) -> None:
    assert call_arguments(text) == {}
