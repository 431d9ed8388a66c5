"""Messages and tools: what is read from dicts, and what templates get of it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.generate.request import read_tool_choice
from octavo.text.messages import (
    Message,
    TextPart,
    Tool,
    ToolCall,
    message_variables,
    read_messages,
    read_tools,
    tool_variables,
    with_short_ids,
)


def test_everything_is_read_and_told() -> None:
    """What transformers would give a template is what ours gets, unknown keys too."""
    given: list[dict[str, Any]] = [
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "assistant", "reasoning_content": "hm", "thinking": "well", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
            {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {}}},
        ]},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
    ]  # fmt: skip
    messages = read_messages(given)
    assert messages[1] == Message(
        "assistant", None, (ToolCall("f", {"a": 1}), ToolCall("g", {}, "c2")), "hm",
        extra={"thinking": "well"},
    )  # fmt: skip
    assert [message_variables(m) for m in messages] == given


def test_forms_that_mean_the_same() -> None:
    """Parts and text, arguments as text and as an object, null and nothing."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = read_messages([{"role": "user", "content": parts, "name": None}])
    assert message == Message("user", (TextPart("a"), TextPart("b")))
    assert message_variables(message) == {"role": "user", "content": "ab"}
    for function in ({"name": "f", "arguments": '{"a": 1}'}, {"name": "f", "arguments": {"a": 1}}):
        for call in ({"function": function}, function):
            (message,) = read_messages(
                [{"role": "assistant", "content": None, "tool_calls": [call]}]
            )
            assert message.tool_calls == (ToolCall("f", {"a": 1}),)


def test_the_other_names_of_a_role_and_of_thoughts() -> None:
    (system, thought, both) = read_messages([
        {"role": "developer", "content": "a"}, {"role": "assistant", "reasoning": "hm"},
        {"role": "assistant", "reasoning": "x", "reasoning_content": "hm"},
    ])  # fmt: skip
    assert system == Message("system", (TextPart("a"),))
    assert thought == both == Message("assistant", reasoning="hm")


def test_refusals_are_content() -> None:
    part = {"type": "refusal", "refusal": "No."}
    for given in ({"content": [part]}, {"content": None, "refusal": "No."}, {"content": "No."}):
        (message,) = read_messages([{"role": "assistant", **given}])
        assert message == Message("assistant", (TextPart("No."),))


def test_tools() -> None:
    given = {"type": "function", "function": {
        "name": "f", "description": "", "parameters": {"type": "object"}, "return": {"type": "string"},
    }}  # fmt: skip
    (tool,) = read_tools([given])
    assert tool == Tool("f", "", {"type": "object"}, {"type": "string"})
    assert tool_variables(tool) == given
    strict = {"name": "f", "strict": True}
    assert read_tools([{"type": "function", "function": strict}]) == [Tool("f", strict=True)]


CALL = {"function": {"name": "f", "arguments": "[1]"}}


@pytest.mark.parametrize(("given", "param"), [
    ("hi", "messages[1]"), ({}, "messages[1].role"), ({"role": 1}, "messages[1].role"),
    ({"role": "user", "content": 5}, "messages[1].content"),
    ({"role": "user", "content": ["x"]}, "messages[1].content[0].type"),
    ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0].type"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
    ({"role": "user", "name": 5}, "messages[1].name"),
    ({"role": "assistant", "reasoning": 5}, "messages[1].reasoning"),
    ({"role": "user", "tool_calls": [CALL]}, "messages[1].tool_calls"),
    ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls"),
    ({"role": "assistant", "tool_calls": [1]}, "messages[1].tool_calls[0].function.name"),
    ({"role": "assistant", "tool_calls": [{"function": 1}]}, "messages[1].tool_calls[0].function.name"),
    ({"role": "assistant", "tool_calls": [CALL]}, "messages[1].tool_calls[0].function.arguments"),
])  # fmt: skip
def test_what_is_at_fault_is_named(given: Any, param: str) -> None:
    with pytest.raises(RequestError) as error:
        read_messages([{"role": "user", "content": "hi"}, given])
    assert error.value.param == param


@pytest.mark.parametrize(
    "given", ["f", {}, {"function": 1}, {"function": {}}, {"function": {"name": 1}},
              {"function": {"name": "f", "parameters": []}}],
)  # fmt: skip
def test_what_is_no_tool(given: Any) -> None:
    with pytest.raises(RequestError) as error:
        read_tools([{"type": "function", "function": {"name": "f"}}, given])
    assert error.value.param == "tools[1]"
    with pytest.raises(RequestError) as error:
        read_tools([{"type": "x", "function": {"name": "f"}}])
    assert error.value.param == "tools[0].type"


@pytest.mark.parametrize(
    "given", [{"function": {}}, {"type": "function"}, {"function": {"name": 3}}]
)
def test_a_choice_of_no_tool(given: Any) -> None:
    with pytest.raises(RequestError) as error:
        read_tool_choice(given)
    assert error.value.param == "tool_choice"


def test_ids_of_calls_are_short_and_still_belong_together() -> None:
    given: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [
            {"id": "call_1", "function": {"name": "f"}}, {"id": "AbCd12345", "function": {"name": "g"}}
        ]},
        {"role": "tool", "tool_call_id": "AbCd12345", "content": ""},
        {"role": "tool", "tool_call_id": "call_1", "content": ""},
        {"role": "assistant", "tool_calls": [{"function": {"name": n}} for n in "fg"]},
        {"role": "tool", "content": ""}, {"role": "tool", "content": ""}, {"role": "tool", "content": ""},
    ]  # fmt: skip
    messages = with_short_ids(read_messages(given))
    one, two = (c.id for c in messages[0].tool_calls)
    assert two == "AbCd12345" and one is not None and re.fullmatch("[0-9a-f]{9}", one)
    assert [m.tool_call_id for m in messages[1:3]] == [two, one]
    three, four = (c.id for c in messages[3].tool_calls)
    assert three != four and [m.tool_call_id for m in messages[4:]] == [three, four, None]
    assert with_short_ids(read_messages(given)) == messages
