"""Bodies: unknown names and oversized fields are refused by name before they are decoded."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest

from octavo.errors import ContextExceeded, InvalidValue, RequestError
from octavo.server.parsing import Fields, parse
from octavo.server.sizes import (
    MAX_NESTED,
    SMALL,
    AtMost,
    Entries,
    Ids,
    Inputs,
    Mixed,
    SizeBounds,
    Texts,
    check_nesting,
)

BOUNDS = SizeBounds(context=1000, vocabulary=500)
FIELDS = Fields(frozenset({"user"}), {"audio": (), "suffix": ("",)})


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    a: int


class Example(msgspec.Struct, kw_only=True):
    model: str | None = None
    text: str
    inner: list[Inner] = []
    ids: Annotated[list[int], Ids()] = []
    any: Annotated[Any, AtMost(SMALL)] = None


def read(data: bytes | dict[str, Any], asked: list[str | None] | None = None) -> Example:
    def find(name: str | None) -> SizeBounds:
        if asked is not None:
            asked.append(name)
        return BOUNDS

    data = data if isinstance(data, bytes) else msgspec.json.encode(data)
    return parse(data, Example, FIELDS, find)


def refusal(data: bytes | dict[str, Any]) -> tuple[str | None, str | None, str]:
    with pytest.raises(RequestError) as refused:
        read(data)
    return refused.value.param, refused.value.code, str(refused.value)


def test_fields_that_any_body_may_have() -> None:
    assert read({"text": "a", "user": {"b": 1}, "suffix": "", "audio": None}).text == "a"
    wrong = "audio", "unsupported_parameter", "audio is not supported here"
    assert refusal({"text": "a", "audio": {}}) == wrong
    assert refusal({"text": "a", "suffix": "b"})[0] == "suffix"
    assert refusal({"text": "a", "suffix": 10**400})[0] == "suffix"


@pytest.mark.parametrize(
    ("data", "param", "code"),
    [
        ({"text": "a", "txet": 1}, "txet", "unsupported_parameter"),
        ({}, "text", "invalid_value"),
        ({"text": 1}, "text", "invalid_value"),
        ({"text": "a", "inner": [{"a": 1}, {"b": 1}]}, "inner[1].b", "unsupported_parameter"),
        ({"text": "a", "inner": [{}]}, "inner[0].a", "invalid_value"),
        ({"text": "a", "inner": [{"a": "1"}]}, "inner[0].a", "invalid_value"),
        (b"[]", None, "invalid_value"),
        (b"", None, "invalid_value"),
        (b'{"text": "\xff"}', None, "invalid_value"),
        (b'{"text": "a"', None, "invalid_value"),
        (b'{"any":' * 100_000, None, "invalid_value"),
    ],
    ids=repr,
)  # fmt: skip
def test_errors_name_the_whole_path(data: Any, param: str | None, code: str) -> None:
    assert refusal(data)[:2] == (param, code)


def test_bounds_are_those_of_the_model_that_is_named() -> None:
    asked: list[str | None] = []
    read({"text": "a", "model": "small"}, asked)
    assert asked == []  # nothing in a small body takes long
    read({"text": "a" * SMALL, "model": "b"}, asked)
    read({"text": "a" * SMALL}, asked)
    assert asked == ["b", None]
    assert refusal({"text": "a" * SMALL, "model": 5})[0] == "model"
    assert refusal({"text": "a" * SMALL, "ids": [1] * 501})[0] == "ids"
    assert refusal({"text": "a", "any": "b" * SMALL})[0] == "any"


def outcome(rule: Any, text: bytes) -> type[Exception] | None:
    try:
        rule.check(text, "field", BOUNDS)
    except RequestError as e:
        assert e.param == "field"
        return type(e)
    return None


@pytest.mark.parametrize(
    ("rule", "text", "error"),
    [
        (AtMost(8), b'"123456"', None),
        (AtMost(8), b'"1234567"', InvalidValue),
        (AtMost(1 << 30), b"[" * MAX_NESTED, None),
        (AtMost(1 << 30), b"[" * MAX_NESTED + b"{", InvalidValue),
        (Entries(b"role", 2), b'{"role"} {"role"} {"role": "role"}', None),
        (Entries(b"role", 2), b'"role"' * 5, InvalidValue),
        (Ids(), b"[" + b"1," * 499 + b"1]", None),
        (Ids(), b"[" + b"1," * 500 + b"1]", InvalidValue),
        (Ids(2), b"[1,2,3]", InvalidValue),
        (Texts(2), b'["a", {"text": "b"}]', None),
        (Texts(2), b'["a","b","c","d","e"]', InvalidValue),
        (Texts(2), b'"a \\" b \\" c \\" d \\" e"', None),
        (Inputs(2), b'"any text, with commas"', None),
        (Inputs(2), b'[ "a", "b" ]', None),
        (Inputs(2), b'["a", 1]', InvalidValue),
        (Inputs(2), b"[" + b"1," * 1000 + b"1]", None),
        (Inputs(2), b"[" + b"1," * 1001 + b"1]", ContextExceeded),
        (Inputs(2), b"[[1],[2]]", None),
        (Inputs(2), b"[[1],[2],[3]]", InvalidValue),
        (Inputs(2), b'[[1],"a"]', InvalidValue),
        (Inputs(2), b"[1,[2]]", InvalidValue),
    ],
    ids=lambda x: repr(x)[:40],
)  # fmt: skip
def test_sizes(rule: Any, text: bytes, error: type[Exception] | None) -> None:
    assert outcome(rule, text) is error


def test_nesting_is_counted_over_all_texts() -> None:
    check_nesting([b"[" * (MAX_NESTED // 2)] * 2, "field")
    with pytest.raises(InvalidValue, match=f"{MAX_NESTED + 2:,} objects and lists"):
        check_nesting([b"[" * (MAX_NESTED // 2 + 1)] * 2, "field")


def test_truth_is_no_number() -> None:
    fields = Fields(unsupported={"flag": (False,), "power": (0, -1)})
    for taken in ({"flag": False}, {"flag": None}, {"power": 0}, {"power": 0.0}, {"power": -1}):
        assert (
            parse(
                msgspec.json.encode({"text": "a"} | taken), Example, fields, lambda _: BOUNDS
            ).text
            == "a"
        )
    for refused in (
        {"flag": 0},
        {"flag": 0.0},
        {"power": False},
        {"flag": True},
        {"power": "0" * 80},
    ):
        with pytest.raises(RequestError, match="is not supported here"):
            parse(msgspec.json.encode({"text": "a"} | refused), Example, fields, lambda _: BOUNDS)


def test_prompts_that_mix_texts_and_ids_are_bounded() -> None:
    rule = Mixed(3)
    for fits in ('"a, b, [c]"', "[1, 2]", '[1, "a,b,c", 2]', '[[1, "a"], "b, c", [2]]'):
        rule.check(fits.encode(), "prompt", BOUNDS)
    rule.check(b'["' + b"a," * 5000 + b'"]', "prompt", BOUNDS)
    with pytest.raises(InvalidValue, match="over 3 entries"):
        rule.check(b"[[1],[1],[1],[1]]", "prompt", BOUNDS)
    with pytest.raises(ContextExceeded):
        rule.check(b"[" + b"1," * 2000 + b'"a"]', "prompt", BOUNDS)
