"""Errors name the field of the route that is at fault, whichever part of the server finds them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.server import Server

LONG = "word " * 9000  # tokens, of a context of 8192
MESSAGES = [{"role": "user", "content": "hi"}]
# Compiles at once. While it is decoded, its automaton needs a state for each set of the last 40
# places where an `e` may be, which soon are more than it may have.
COSTLY = "([a-z ]*e[a-z ]{40})+~"
SCHEMA = {
    "type": "object", "properties": {"x": {"type": "string", "pattern": f"^{COSTLY}$"}},
    "required": ["x"], "additionalProperties": False,
}  # fmt: skip


def blamed(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, reply = server.post(path, body)
    assert status == 400, reply
    error: dict[str, Any] = reply["error"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["a", LONG]}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 9000}, "prompt"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 10**6}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 10**6}, "messages"),
        ("/v1/embeddings", {"input": LONG}, "input"),
        ("/v1/embeddings", {"input": [[5] * 9000]}, "input"),
        ("/v1/rerank", {"query": "a", "documents": ["b", LONG]}, "documents"),
        ("/v1/score", {"text_1": LONG, "text_2": "a"}, "text_1"),
    ],
)  # fmt: skip
def test_what_is_too_long(server: Server, path: str, body: dict[str, Any], field: str) -> None:
    error = blamed(server, path, body)
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert f" in the {field}" in error["message"]
    others = {"prompt", "messages", "input", "documents", "pairs", "inputs"} - {field}
    assert not others & set(error["message"].replace(",", "").split())


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "hi", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": [10**6]}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/embeddings", {"input": [10**6]}, "input"),
        ("/v1/chat/completions", {"messages": MESSAGES, "thinking_token_budget": 5}, "thinking_token_budget"),
        ("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
        ("/v1/chat/completions", {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
        ("/v1/completions", {"prompt": "hi", "structured_outputs": {"json": {"type": "x"}}}, "structured_outputs"),
        ("/v1/completions", {"prompt": "hi", "structured_outputs": {"json": "{"}}, "structured_outputs"),
        ("/v1/completions", {"prompt": "hi", "structured_outputs": {"regex": "("}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_what_is_invalid(server: Server, path: str, body: dict[str, Any], field: str) -> None:
    error = blamed(server, path, body)
    assert error["param"] == field
    assert "template_options" not in error["message"] and "thinking_budget" not in error["message"]


CONSTRAINTS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "response_format"),
    ({"structured_outputs": {"regex": COSTLY}}, "structured_outputs"),
    ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}], "tool_choice": "required"}, "tools"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "field"), CONSTRAINTS, ids=lambda x: str(x)[:30])
def test_a_grammar_that_becomes_too_costly(
    server: Server, fields: dict[str, Any], field: str
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1500, "temperature": 1.0, "seed": 1} | fields
    error = blamed(server, "/v1/chat/completions", body)
    assert (error["param"], error["code"]) == (field, "constraint_failed")
