"""Replies taken apart: the same however the text is cut, in linear time, and nothing lost."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.text import ReplyParser
from octavo.text.call_scanner import CallScanner
from octavo.text.messages import Tool, ToolCall, read_messages
from octavo.text.tools import (
    GEMMA,
    HERMES,
    LLAMA3,
    MISTRAL,
    ToolFormat,
    format_of,
    without_tools,
    written,
)

Taken = tuple[str, str, list[tuple[str, str]]]


def read(
    text: str,
    style: ToolFormat | None,
    cuts: list[int],
    reasoning: bool = False,
    thinking: bool = False,
    names: frozenset[str] | None = None,
) -> Taken:
    """(content, reasoning, calls) of a text that comes in pieces."""
    parser = ReplyParser(style, reasoning, thinking, names)
    content = thoughts = ""
    calls: list[list[str]] = []
    edges = [0, *sorted(c for c in cuts if c < len(text)), len(text)]
    for a, b in zip(edges, edges[1:], strict=False):
        for delta in (
            parser.push(text[a:b]),
            parser.finish() if b == len(text) else parser.push(""),
        ):
            content += delta.content
            thoughts += delta.reasoning
            for call in delta.calls:
                if call.id is not None:
                    calls.append([call.name or "", ""])
                calls[call.index][1] += call.arguments
    return content, thoughts, [(n, a) for n, a in calls]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
arguments = st.dictionaries(st.text("abc", min_size=1, max_size=5), values, max_size=3)
named = st.tuples(st.sampled_from(["f", "get_x", "a.b-c"]), arguments)


def compose(style: ToolFormat, calls: list[tuple[str, Any]], spaced: bool, swapped: bool) -> str:
    objects = []
    for name, given_arguments in calls:
        items = [("name", name), (style.key, given_arguments)]
        body = dict(reversed(items) if swapped else items)
        objects.append(json.dumps(body, ensure_ascii=False, indent=2 if spaced else None))
    if style is HERMES:
        return "\n".join(f"<tool_call>\n{o}\n</tool_call>" for o in objects)
    if style is MISTRAL:
        return "[TOOL_CALLS] [" + ", ".join(objects) + "]"
    if style is GEMMA:
        return "```json\n" + "\n".join(objects) + "\n```"
    return "; ".join(objects)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([HERMES, LLAMA3, MISTRAL, GEMMA]), st.lists(named, min_size=1, max_size=3), st.booleans(),
    st.booleans(), st.lists(st.integers(0, 400), max_size=40),
)  # fmt: skip
def test_calls_survive_any_cut(
    style: ToolFormat, calls: list[tuple[str, Any]], spaced: bool, swapped: bool, cuts: list[int]
) -> None:
    content, _, got = read(compose(style, calls, spaced, swapped), style, cuts)
    assert not content.strip()
    assert [(n, json.loads(a)) for n, a in got] == calls


@settings(max_examples=400, deadline=None)
@given(
    st.text('<tool_call>/{}[]",:aename \n`json', max_size=80), st.sampled_from([HERMES, LLAMA3, MISTRAL, GEMMA]),
    st.lists(st.integers(0, 80), max_size=30),
)  # fmt: skip
def test_cuts_never_matter(text: str, style: ToolFormat, cuts: list[int]) -> None:
    assert read(text, style, cuts) == read(text, style, [])


UNITS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>", "```json\n",
    "```tool_call\n", "```", '{"name": "f", "arguments": {"a": [1, "x}"]}}', '{"parameters": {}, "name": "g"}',
    '{"name": "f"}', '{"a": 1}', "{", "}", "[", "]", '"', ":", ",", " ", "\n", ";", "hello", "get_x", "<", "`",
    "\\", '"name"', '"arguments"', " " * 70, "\n" * 70, ", " * 140,
]  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(
    st.lists(st.sampled_from(UNITS), max_size=14).map("".join),
    st.sampled_from([None, HERMES, LLAMA3, MISTRAL, GEMMA]), st.booleans(), st.booleans(),
    st.lists(st.integers(0, 400), max_size=30),
)  # fmt: skip
def test_cuts_never_matter_between_markers(
    text: str, style: ToolFormat | None, reasoning: bool, thinking: bool, cuts: list[int]
) -> None:
    whole = read(text, style, [], reasoning, thinking)
    assert read(text, style, cuts, reasoning, thinking) == whole
    assert read(text, style, list(range(len(text))), reasoning, thinking) == whole


@pytest.mark.parametrize(
    "text", ["<tool_call></tool_call>Hi", "a <tool_call> \n<tool_call>b", '<tool_call>{"a": 1}</tool_call>',
             "<tool_call>" + ", " * 300, "```json\n```\nHi", "[TOOL_CALLS]no call", "[TOOL_CALLS] " + "n" * 300 + "{}"]
)  # fmt: skip
@pytest.mark.parametrize("style", [HERMES, LLAMA3, MISTRAL, GEMMA], ids=lambda s: s.name)
def test_what_is_no_call_is_content(text: str, style: ToolFormat) -> None:
    """Markers that lead to no call stay where they were written."""
    assert read(text, style, list(range(len(text)))) == (text, "", [])


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60), st.lists(st.integers(0, 60), max_size=20))
def test_plain_text_passes(text: str, cuts: list[int]) -> None:
    assert read(text, None, cuts) == (text, "", [])


@pytest.mark.parametrize(
    ("text", "style", "calls"),
    [
        ('[TOOL_CALLS]f[ARGS]{"a": {"b": 1}}[TOOL_CALLS]g{}', MISTRAL, [("f", '{"a": {"b": 1}}'), ("g", "{}")]),
        ('[TOOL_CALLS]f[CALL_ID]a1[ARGS]{"b": 1}', MISTRAL, [("f", '{"b": 1}')]),
        ('<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', LLAMA3, [("f", "{}")]),
        ('{"name": "f"}', GEMMA, [("f", "{}")]),
        ('Sure.\n<tool_call>{"name": "f", "arguments": {"a', HERMES, [("f", '{"a')]),
        ('<tool_call>{"arguments": "{\\"a\\": \\"\\\\u00e9\\"}", "name": "f"}', HERMES, [("f", '{"a": "\\u00e9"}')]),
        ('{"name": "f", "parameters": "{\n\\"a\\": [1]}"}', LLAMA3, [("f", '{\n"a": [1]}')]),
        ('{"name": "f", "parameters": ""}; {"name": "g", "parameters": "[1]"}', LLAMA3, [("f", "{}"), ("g", "{}")]),
        ('[TOOL_CALLS][{"name": "f", "arguments": "{\\"a\\": "}]', MISTRAL, [("f", "{}")]),
        ('[TOOL_CALLS][{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}]', MISTRAL, [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{}', HERMES, [("f", "")]),
    ],
)  # fmt: skip
def test_other_ways_to_write_a_call(
    text: str, style: ToolFormat, calls: list[tuple[str, str]]
) -> None:
    for step in (1, 3, 1000):
        assert read(text, style, list(range(0, len(text), step)))[2] == calls


@pytest.mark.parametrize("style", [LLAMA3, GEMMA], ids=lambda s: s.name)
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 5}', '{"name": "Bob"}', '{"type": "x", "name": "Bob", "arguments": {}}',
        '{"id": 1, "name": "Bo', '{"name": "Bob", "name": "f"}',
    ],
)  # fmt: skip
def test_json_that_names_no_function_is_content(style: ToolFormat, text: str) -> None:
    for said in (text, f"```json\n{text}\n```" if style is GEMMA else text):
        for step in (1, 3, 1000):
            cuts = list(range(0, len(said), step))
            assert read(said, style, cuts, names=frozenset({"f"})) == (said, "", [])
    call = '{"name": "f", "parameters": {"a": 1}}'
    assert read(call, style, [], names=frozenset({"f"}))[2] == [("f", '{"a": 1}')]
    for step in (1, 1000):  # the first name counts
        twice = '{"name": "f", "parameters": {"a": 1}, "name": "x"}'
        cuts = list(range(0, len(twice), step))
        assert read(twice, style, cuts, names=frozenset({"f"})) == ("", "", [("f", '{"a": 1}')])
    marked = '<tool_call>{"name": "Bob", "arguments": {}}</tool_call>'
    assert read(marked, HERMES, [], names=frozenset({"f"}))[2] == [("Bob", "{}")]


@pytest.mark.parametrize(
    ("text", "thinking", "content", "thoughts"),
    [
        ("<think>\nhm, <b>\n</think>\n\nHi", False, "Hi", "\nhm, <b>"), ("hm\n</think>\nHi", True, "Hi", "hm"),
        ("Hi <think>x</think>", False, "Hi <think>x</think>", ""), ("never ends", True, "", "never ends"),
        ("  <thin", False, "  <thin", ""),
    ],
)  # fmt: skip
def test_thoughts(text: str, thinking: bool, content: str, thoughts: str) -> None:
    for step in (1, 2, 5, 1000):
        assert read(text, None, list(range(0, len(text), step)), True, thinking) == (
            content,
            thoughts,
            [],
        )


@pytest.mark.parametrize(
    "unit", ["<tool_call>", '{"a":', '<tool_call>{"name":"f","arguments":{"x":"' + "y" * 50, " ", "[TOOL_CALLS]", "\n<", "```json\n"]
)  # fmt: skip
@pytest.mark.parametrize("style", [HERMES, LLAMA3, MISTRAL, GEMMA], ids=lambda s: s.name)
def test_work_is_linear(unit: str, style: ToolFormat) -> None:
    """What is looked at again with the next piece is bounded, however long the text."""
    parser = ReplyParser(style, True, False)
    text = unit * (50_000 // len(unit))
    for i in range(0, len(text), 16):
        parser.push(text[i : i + 16])
        assert len(parser._stream.text) + len(parser._stream.preamble) < 1024


def test_what_may_be_no_call_is_kept_in_linear_time() -> None:
    """The last of 800,000 pushes copies no more than the first did."""
    scanner, seconds = CallScanner(), []
    scanner.push('{"id": "')
    for _ in range(10):
        began = time.thread_time()
        for _ in range(80_000):
            scanner.push("x")
        seconds.append(time.thread_time() - began)
    assert scanner.text == '{"id": "' + 800_000 * "x"
    assert sum(seconds[-3:]) < 3 * sum(seconds[:3])


def test_templates_without_tools() -> None:
    messages = read_messages([
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "one"}, {"role": "tool", "content": "two"},
    ])  # fmt: skip
    out = without_tools(messages, [Tool("f")], HERMES)
    assert [m.role for m in out] == ["system", "user", "assistant", "user"]
    assert '"name": "f"' in out[0].text and "<tool_call>" in out[0].text
    assert out[2].text == written(ToolCall("f", {"a": 1}), HERMES)
    assert out[3].text == (
        "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    )
    assert without_tools(messages[:1], [], HERMES) == messages[:1]


def test_styles_are_told_by_their_templates() -> None:
    for source, style in (
        ("...<tool_call>...", HERMES), ("<|start_header_id|>", LLAMA3), ("[TOOL_CALLS]", MISTRAL),
        ("<start_of_turn>", GEMMA), ("<|im_start|>", HERMES),
    ):  # fmt: skip
        assert format_of(source) is style
