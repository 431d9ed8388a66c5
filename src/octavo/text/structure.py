"""What a reply has to look like, as a request says it: data, made into a grammar by `lark`.

Requests are checked by whoever makes that grammar, in a process that can be killed; before that
they are only measured.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.text import grammar
from octavo.text.tools import ToolGrammar

MAX_BYTES = 4 << 20  # of a structure


class JsonSchema(msgspec.Struct, frozen=True, tag=True):
    """A JSON Schema, given under the name `param`; `text`: as JSON still to be read."""

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
    """May come before the reply; see `grammar.after_thoughts`."""

    opening: str
    closing: str
    inside: bool


class Structure(msgspec.Struct, frozen=True):
    """One constraint of a reply."""

    what: JsonSchema | Regex | Choice | Grammar | ToolGrammar
    thoughts: Thoughts | None = None

    @property
    def exits(self) -> bool:
        """Whether the grammar is to be decoded with `SamplingParams.grammar_exit`."""
        return isinstance(self.what, ToolGrammar) and self.what.exits

    def lark(self) -> str:
        """The grammar. Raises RequestError for what cannot be made one."""
        text = self.what.lark()
        if (t := self.thoughts) is not None:
            text = grammar.after_thoughts(text, t.opening, t.closing, t.inside)
        return text

    def encode(self) -> bytes:
        """The structure as `decode` takes it. Raises RequestError for one that is too long."""
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
