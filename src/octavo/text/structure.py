"""Constraints on a reply (schema, regular expression, choice, grammar) as serializable data.

`lark` turns one into a grammar. That is done in sandboxed worker processes, because a constraint
may be hostile; before that only its size is checked.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.text import grammar
from octavo.text.tools import ToolGrammar

MAX_BYTES = 4 << 20  # of a structure


class JsonSchema(msgspec.Struct, frozen=True, tag=True):
    """A JSON Schema, or its JSON text. param: the request's field that it came in, for errors."""

    schema: Any = None
    param: str = "response_format"
    text: str | None = None

    def lark(self) -> str:
        schema = self.schema
        if self.text is not None:
            try:
                schema = msgspec.json.decode(self.text)
            except (msgspec.DecodeError, RecursionError):
                raise RequestError(
                    f"{self.param}.json is not JSON", self.param, "invalid_value"
                ) from None
        return grammar.from_schema(schema, self.param)


class Regex(msgspec.Struct, frozen=True, tag=True):
    pattern: str

    def lark(self) -> str:
        return grammar.from_regex(self.pattern)


class Choice(msgspec.Struct, frozen=True, tag=True):
    choices: list[str]

    def lark(self) -> str:
        return grammar.from_choice(self.choices)


class Grammar(msgspec.Struct, frozen=True, tag=True):
    text: str

    def lark(self) -> str:
        return grammar.from_grammar(self.text)


class Thoughts(msgspec.Struct, frozen=True):
    """Markers of thoughts that may precede the reply. inside: the prompt opened them already."""

    opening: str
    closing: str
    inside: bool


class Structure(msgspec.Struct, frozen=True):
    """The constraint of a reply."""

    what: JsonSchema | Regex | Choice | Grammar | ToolGrammar
    thoughts: Thoughts | None = None

    @property
    def exits(self) -> bool:
        """True if decoding needs `SamplingParams.grammar_exit`: the model may leave the grammar."""
        return isinstance(self.what, ToolGrammar) and self.what.exits

    def lark(self) -> str:
        """The constraint as a Lark grammar. Raises RequestError if that is impossible."""
        text = self.what.lark()
        if (t := self.thoughts) is not None:
            text = grammar.after_thoughts(text, t.opening, t.closing, t.inside)
        return text

    def encode(self) -> bytes:
        """Serializes for `decode`. Raises RequestError above MAX_BYTES."""
        try:
            data = msgspec.json.encode(self)
        except (UnicodeEncodeError, RecursionError, msgspec.EncodeError):
            raise RequestError(
                "a schema or grammar is Unicode text", "response_format", "invalid_grammar"
            ) from None
        if len(data) > MAX_BYTES:
            raise RequestError(
                f"schemas and grammars take {len(data)} bytes; {MAX_BYTES} at most",
                "response_format", "invalid_grammar",
            )  # fmt: skip
        return data

    @staticmethod
    def decode(data: bytes) -> Structure:
        return msgspec.json.decode(data, type=Structure)
