"""Any text can be made to appear: streams, stop strings, tool calls and logprobs, deterministically."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.server import Server

TEXTS = {
    "family": "👨‍👩‍👧‍👦 and 🏳️‍🌈🇩🇪", "cjk": "日本語とカタカナ、漢字。", "thai": "ภาษาไทยสวัสดี", "arabic": "مَرْحَبًا بِالعَالَم",
    "math": "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛", "variation": "a\ufe0fb\ufe0e\u0301", "lines": "a\u2028b\u2029c\r\nd\r\te",
    "control": "\x01\x07\x1b[0m\x7f", "tokens": "</s><|im_end|><s>[INST]", "quotes": '"\\" \\n {"a": ["b"]}',
    "long": "The end. " * 300, "mixed": "x é 𝄞 日 \U0001f600 z " * 20, "nothing special": "Paris",
}  # fmt: skip


def body(text: str, **changes: Any) -> dict[str, Any]:
    return {
        "model": "smollm2", "messages": [{"role": "user", "content": "Say it."}],
        "structured_outputs": {"choice": [text]}, "max_tokens": 2500,
    } | changes  # fmt: skip


def whole(server: Server, request: dict[str, Any]) -> list[dict[str, Any]]:
    status, reply = server.post("/v1/chat/completions", request)
    assert status == 200, reply
    return reply["choices"]  # type: ignore[no-any-return]


def streamed(server: Server, request: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a stream put together; every line is JSON of its own."""
    status, text = server.call(
        "POST", "/v1/chat/completions", json.dumps(request | {"stream": True}).encode()
    )
    assert status == 200, text
    lines = [line for line in text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    out: dict[int, dict[str, Any]] = {}
    for line in lines:
        chunk = json.loads(line.removeprefix("data: "))
        for choice in chunk["choices"]:
            made = out.setdefault(
                choice["index"],
                {"content": "", "reasoning": "", "logprobs": [], "calls": {}, "finish": None},
            )
            made["content"] += choice["delta"].get("content") or ""
            made["reasoning"] += choice["delta"].get("reasoning_content") or ""
            made["finish"] = choice["finish_reason"] or made["finish"]
            if choice["logprobs"]:
                made["logprobs"] += choice["logprobs"]["content"]
            for call in choice["delta"].get("tool_calls") or []:
                known = made["calls"].setdefault(call["index"], ["", ""])
                known[0] += call["function"].get("name") or ""
                known[1] += call["function"]["arguments"]
    return [out[i] for i in sorted(out)]


@pytest.mark.parametrize("name", TEXTS)
def test_texts_come_through(server: Server, name: str) -> None:
    text = TEXTS[name]
    for logprobs in (False, True):
        request = body(text, logprobs=logprobs)
        (choice,), (stream,) = whole(server, request), streamed(server, request)
        assert choice["message"]["content"] == stream["content"] == text
        assert choice["finish_reason"] == stream["finish"] == "stop"
        if logprobs:
            assert choice["logprobs"]["content"] == stream["logprobs"]
            shown = b"".join(bytes(t["bytes"]) for t in stream["logprobs"])
            assert shown.decode() == text


@pytest.mark.parametrize("name", ["family", "cjk", "math", "mixed"])
def test_a_cut_shows_no_half_character(server: Server, name: str) -> None:
    text = TEXTS[name]
    for limit in range(1, 24):
        request = body(text, max_tokens=limit, n=2, return_token_ids=True)
        for a, b in zip(whole(server, request), streamed(server, request), strict=True):
            ids = a["token_ids"]
            said = server.post("/detokenize", {"tokens": ids})[1]["prompt"].rstrip("\ufffd")
            assert a["message"]["content"] == b["content"] == said and text.startswith(said)
            ended = "stop" if b["content"] == text else "length"
            assert {"stop": len(ids) <= limit, "length": len(ids) == limit}[ended]
            assert a["finish_reason"] == b["finish"] == ended


@pytest.mark.parametrize("text", ["aaSTOPbb", "日本STOP語é", "ababcabcabd"])
def test_stop_strings_at_every_offset(server: Server, text: str) -> None:
    stops = [[text[i:j]] for i in range(len(text)) for j in range(i + 1, min(len(text), i + 6) + 1)]
    stops += [["ab", "abc"], ["STOPX", "TOPb"], ["zzz"], [text + "x", text[-1]]]
    for stop in stops:
        at = min((text.find(s) for s in stop if s in text), default=len(text))
        request = body(text, stop=stop, n=2, logprobs=True)
        for a, b in zip(whole(server, request), streamed(server, request), strict=True):
            assert a["message"]["content"] == b["content"] == text[:at], stop
            assert a["finish_reason"] == b["finish"] == "stop"
    server.wait_idle()


ARGUMENTS = {"city": 'São "Paulo" 日本 {x} ]', "n": [1, {"a": None}], "s": "</tool_call> \\ \n"}


@pytest.mark.parametrize(
    ("before", "calls"),
    [
        ("", [("get", ARGUMENTS)]), ("Let me see.", [("get", {})]), ("", [("get", ARGUMENTS), ("other", {"a": 1})]),
        ("a < b and <tool", [("get", {"deep": [[[{}]]]})]),
    ],
    ids=["one", "text", "two", "near"],
)  # fmt: skip
def test_tool_calls_come_through(server: Server, before: str, calls: list[tuple[str, Any]]) -> None:
    blocks = [
        "<tool_call>\n"
        + json.dumps({"name": n, "arguments": a}, ensure_ascii=False)
        + "\n</tool_call>"
        for n, a in calls
    ]
    text = "\n".join([*([before] if before else []), *blocks])
    tools = [
        {"type": "function", "function": {"name": n, "parameters": {"type": "object"}}}
        for n in ("get", "other")
    ]
    request = body(text, tools=tools)
    (choice,), (stream,) = whole(server, request), streamed(server, request)
    made = [
        (c["function"]["name"], c["function"]["arguments"]) for c in choice["message"]["tool_calls"]
    ]
    assert made == [tuple(stream["calls"][i]) for i in sorted(stream["calls"])]
    assert [(n, json.loads(a)) for n, a in made] == calls
    assert (choice["message"]["content"] or "") == stream["content"] == before
    assert choice["finish_reason"] == stream["finish"] == "tool_calls"


@pytest.mark.parametrize(
    "text",
    ["<tool_call> not json", '<tool_call>{"x": 1}</tool_call>', "<tool_call>", '{"name": "get"}'],
)
def test_what_is_no_call_stays_text(server: Server, text: str) -> None:
    tools = [{"type": "function", "function": {"name": "get"}}]
    (choice,), (stream,) = (
        whole(server, body(text, tools=tools)),
        streamed(server, body(text, tools=tools)),
    )
    assert choice["message"]["content"] == stream["content"] == text
    assert "tool_calls" not in choice["message"] and not stream["calls"]
