"""A constraint makes any text appear: the same in every dialect, whole and streamed, whatever it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.api.server import Server
from tests.api.test_forced import TEXTS

SAY = [{"role": "user", "content": "Say it."}]
MOST = 4000  # tokens


def events(text: str) -> list[Any]:
    """The objects of an event stream."""
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat(schema: Any, stop: list[str]) -> tuple[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return "/v1/chat/completions", {"messages": SAY, "response_format": form, "stop": stop}


def chat_text(text: str, stream: bool) -> str:
    if not stream:
        return str(json.loads(text)["choices"][0]["message"]["content"])
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in events(text))


def completions(schema: Any, stop: list[str]) -> tuple[str, Any]:
    return "/v1/completions", {"structured_outputs": {"json": schema}, "stop": stop}


def completions_text(text: str, stream: bool) -> str:
    made = events(text) if stream else [json.loads(text)]
    return "".join(c["choices"][0]["text"] for c in made)


def responses(schema: Any, stop: list[str]) -> tuple[str, Any]:
    form = {"type": "json_schema", "name": "a", "schema": schema}
    return "/v1/responses", {"input": "Say it.", "text": {"format": form}, "store": False}


def responses_text(text: str, stream: bool) -> str:
    if not stream:
        return str(json.loads(text)["output"][0]["content"][0]["text"])
    return "".join(e["delta"] for e in events(text) if e["type"] == "response.output_text.delta")


def anthropic(schema: Any, stop: list[str]) -> tuple[str, Any]:
    form = {"format": {"type": "json_schema", "schema": schema}}
    body = {"messages": SAY, "output_config": form, "stop_sequences": stop}
    return "/v1/messages", body


def anthropic_text(text: str, stream: bool) -> str:
    if not stream:
        return "".join(block["text"] for block in json.loads(text)["content"])
    return "".join(e["delta"]["text"] for e in events(text) if e["type"] == "content_block_delta")


def ollama(schema: Any, stop: list[str]) -> tuple[str, Any]:
    return "/api/chat", {"messages": SAY, "format": schema, "options": {"stop": stop}}


def ollama_text(text: str, stream: bool) -> str:
    return "".join(json.loads(line)["message"]["content"] for line in text.split("\n") if line)


def generate(schema: Any, stop: list[str]) -> tuple[str, Any]:
    return "/api/generate", {"prompt": "Say it.", "format": schema, "options": {"stop": stop}}


def generate_text(text: str, stream: bool) -> str:
    return "".join(json.loads(line)["response"] for line in text.split("\n") if line)


def llama_cpp(schema: Any, stop: list[str]) -> tuple[str, Any]:
    return "/completion", {"json_schema": schema, "stop": stop}


def llama_cpp_text(text: str, stream: bool) -> str:
    made = events(text) if stream else [json.loads(text)]
    return "".join(part["content"] for part in made)


Ask = Callable[[Any, list[str]], tuple[str, Any]]
DIALECTS: dict[str, tuple[Ask, Callable[[str, bool], str]]] = {
    "chat": (chat, chat_text), "completions": (completions, completions_text),
    "responses": (responses, responses_text), "anthropic": (anthropic, anthropic_text),
    "ollama chat": (ollama, ollama_text), "ollama generate": (generate, generate_text),
    "llama.cpp": (llama_cpp, llama_cpp_text),
}  # fmt: skip


LIMITS = {"responses": "max_output_tokens", "llama.cpp": "n_predict"}  # names of max_tokens


def said(
    server: Server, name: str, schema: Any, stop: list[str], stream: bool, limit: int = MOST
) -> str:
    """What a dialect says. Those of plain prompts are given the chat's."""
    ask, read = DIALECTS[name]
    path, body = ask(schema, stop)
    if name.startswith("ollama"):
        body["options"]["num_predict"] = limit
    else:
        body[LIMITS.get(name, "max_tokens")] = limit
    if name == "completions":
        body["prompt"] = server.post("/tokenize", {"messages": SAY})[1]["tokens"]
    if name == "llama.cpp":
        body["prompt"] = server.post("/apply-template", {"messages": SAY})[1]["prompt"]
    asked = body | {"model": "smollm2", "stream": stream}
    status, text = server.call("POST", path, json.dumps(asked).encode())
    assert status == 200, text
    return read(text, stream)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_the_same_in_every_dialect(server: Server, name: str) -> None:
    schema = {"const": TEXTS[name]}
    made = {said(server, each, schema, [], stream) for each in DIALECTS for stream in (False, True)}
    (only,) = made
    assert json.loads(only) == TEXTS[name]


@pytest.mark.parametrize("name", ["family", "cjk", "math"])
def test_a_cut_shows_no_half_character(server: Server, name: str) -> None:
    """Wherever it is, every dialect shows the same whole characters."""
    schema = {"const": TEXTS[name]}
    whole, lengths = said(server, "chat", schema, [], False), []
    for limit in range(1, 13):
        ways = [(each, stream) for each in DIALECTS for stream in (False, True)]
        (made,) = {said(server, each, schema, [], stream, limit) for each, stream in ways}
        assert whole.startswith(made)
        lengths.append(len(made))
    assert lengths == sorted(lengths) and 3 < len(set(lengths)) < 12  # some tokens are no character


@pytest.mark.parametrize("text", ["aaSTOPbb", "日本STOP語é"])
def test_stop_strings_cut_it_at_the_same_place(server: Server, text: str) -> None:
    """At every offset. `/v1/responses` has no stop strings."""
    whole = f'"{text}"'
    for i in range(len(text)):
        stop = [text[i : i + 3], text[i] + "zz"]
        cut = whole[: whole.index(stop[0])]
        for name in DIALECTS.keys() - {"responses"}:
            for stream in (False, True):
                assert said(server, name, {"const": text}, stop, stream) == cut, (
                    name,
                    stop,
                    stream,
                )
    server.wait_idle()
