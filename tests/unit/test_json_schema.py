"""Schemas made ready: what is closed only takes away, references stay whose they are, work is linear."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from octavo.errors import RequestError
from octavo.text.grammar import from_grammar, from_schema
from octavo.text.json_schema import MAX_ENUM, MAX_PATTERN, MAX_SCHEMA, close, json_term
from octavo.text.tools import HERMES, LLAMA3, ToolGrammar


def made(schema: Any) -> Any:
    return json.loads(json_term(schema, "p").removeprefix("%json "))


class Leaf(BaseModel):
    size: int


class Tree(BaseModel):
    leaf: Leaf
    children: list[Tree] = []


A, B = {"properties": {"a": {}}}, {"properties": {"b": {}}}
CAT = {
    "type": "object",
    "properties": {"kind": {"const": "cat"}, "lives": {}},
    "required": ["kind"],
}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("schema", "value", "stays"),
    [
        ({"type": "object"}, {"x": 1}, True), (A, {"x": 1}, False), (A, {"a": 1}, True),
        ({"properties": {}}, {"x": 1}, False), (A | {"additionalProperties": True}, {"x": 1}, True),
        (A | {"additionalProperties": {"type": "integer"}}, {"x": 1}, True), (A | {"patternProperties": {"x": {}}}, {"x": 1}, True),
        (A | {"required": ["x"]}, {"x": 1}, True), (A | {"required": ["a"]}, {"a": 1, "x": 1}, False),
        (A | {"minProperties": 2}, {"x": 1, "y": 1}, True), ({"allOf": [A, B]}, {"a": 1, "b": 1}, True),
        ({"allOf": [A]}, {"x": 1}, False), (A | {"allOf": [B]}, {"a": 1, "b": 1}, True), (A | {"anyOf": [B, {}]}, {"a": 1, "b": 1}, True),
        ({"anyOf": [A, B]}, {"x": 1}, False), ({"anyOf": [A, B], "required": ["x"]}, {"x": 1}, True),
        ({"oneOf": [A | {"type": "object"}, {"type": "null"}]}, {"x": 1}, True), ({"oneOf": [CAT, DOG]}, {"kind": "dog", "x": 1}, False),
        ({"items": A}, [{"x": 1}], False), ({"properties": {"o": A}}, {"o": {"x": 1}}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": A}}, {"x": 1}, False), ({"$ref": "#/$defs/a", "$defs": {"a": A}, "required": ["x"]}, {"x": 1}, True),
        ({"allOf": [{"$ref": "#/$defs/a"}, B], "$defs": {"a": A}}, {"a": 1, "b": 1}, True),
        ({"properties": {"p": {"$ref": "#/$defs/a"}, "q": {"allOf": [{"$ref": "#/$defs/a"}, B]}}, "$defs": {"a": A}}, {"q": {"b": 1}}, True),
        ({"properties": {"default": A}}, {"default": {"x": 1}}, False), ({"not": A, "type": "object"}, {}, False),
        ({"$ref": "#a", "$defs": {"a": A | {"$anchor": "a"}}}, {"x": 1}, True),
    ],
)  # fmt: skip
def test_what_is_not_declared_is_not_written(schema: Any, value: Any, stays: bool) -> None:
    closed = made(schema)
    assert jsonschema.Draft202012Validator(closed).is_valid(value) == stays
    if stays:
        assert jsonschema.Draft202012Validator(schema).is_valid(value)


def test_names_are_no_keywords() -> None:
    """A property called `default` has a schema like any other; `const` holds data."""
    date = {"type": "string", "format": "date"}
    schema = made(
        {
            "properties": {"default": date, "enum": date, "pattern": date},
            "const": {"format": "date"},
        }
    )
    for name in ("default", "enum", "pattern"):
        assert set(schema["properties"][name]) == {"type", "pattern"}
    assert schema["const"] == {"format": "date"}


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "[" * 40_000}, {"items": [{"anyOf": [{"pattern": "x" * (MAX_PATTERN + 1)}]}]}, {"enum": ["x"] * (MAX_ENUM + 1)},
        {"const": "x" * MAX_SCHEMA}, {"x": float("nan")}, {"x-guidance": 1}, False, 5,
    ],
)  # fmt: skip
def test_sizes_come_first(schema: Any) -> None:
    began = time.thread_time()
    with pytest.raises(RequestError) as error:
        from_schema(schema, "response_format")
    assert error.value.param == "response_format" and error.value.code == "invalid_grammar"
    assert len(str(error.value)) < 200
    assert time.thread_time() - began < 0.1


@pytest.mark.parametrize("pattern", ["[" * 4000, "[" * 4000 + "\\", "[]" * 2000, "\\S[\\S" * 600])
def test_patterns_are_read_once(pattern: str) -> None:
    began = time.thread_time()
    schema = made({"anyOf": [{"pattern": pattern}] * 20})
    assert time.thread_time() - began < 0.5  # 80,000 characters; a second look at each costs 10 s
    assert [part["pattern"] for part in schema["anyOf"]] == [
        pattern if not pattern.startswith("\\S") else schema["anyOf"][0]["pattern"]
    ] * 20


def test_white_space_as_ecma_counts_it() -> None:
    assert made({"pattern": r"\S[\S][^\]\S]\\S"})["pattern"] == r"[^\s\x{FEFF}][\S][^\]\S]\\S"


def test_closing_leaves_recursion_alone() -> None:
    schema = Tree.model_json_schema()
    closed = close(json.loads(json.dumps(schema)))
    assert closed["$defs"]["Tree"]["additionalProperties"] is False
    assert closed["$defs"]["Leaf"]["additionalProperties"] is False


@pytest.mark.parametrize("style", [HERMES, LLAMA3], ids=lambda s: s.name)
def test_a_tools_references_are_its_own(style: Any) -> None:
    """Each tool's parameters are a document: nothing of ours is around them."""
    markers = {"<tool_call>": '"<tool_call>"', "</tool_call>": '"</tool_call>"'}
    schema = Tree.model_json_schema()
    lark = ToolGrammar(
        [("f", schema), ("g", {"$ref": "#"})], style.name, markers, True, False
    ).lark()
    terms = [line.partition("%json ")[2] for line in lark.split("\n") if "%json" in line]
    assert [json.loads(t).get("$ref") for t in terms] == [schema.get("$ref"), "#"]
    assert json.loads(terms[0])["$defs"].keys() == schema["$defs"].keys()


@pytest.mark.parametrize("kind", ["string", "array", ["string", "null"], 5])
def test_arguments_are_objects(kind: Any) -> None:
    with pytest.raises(RequestError, match="parameters of f"):
        ToolGrammar([("f", {"type": kind})], "llama3", {}, True, False).lark()


def test_a_grammars_own_options_stay() -> None:
    first, _, rest = from_grammar('%llguidance {"allow_initial_skip": true}\nstart: "a"').partition(
        "\n"
    )
    assert json.loads(first.removeprefix("%llguidance")) == {
        "allow_initial_skip": True,
        "no_forcing": True,
    }
    assert rest == 'start: "a"'
    with pytest.raises(RequestError, match="%llguidance"):
        from_grammar("%llguidance {\nstart: x")
