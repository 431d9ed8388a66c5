"""JSON schemas, regular expressions, choices and grammars as the one form engines take: Lark.

The dialect is llguidance's. JSON is written on one line with ", " and ": " between its parts (a
schema's own `x-guidance` may say otherwise), so a model cannot lose itself in white space; and
every tokenization of a text is allowed, so that only illegal tokens lose their probability.
"""

from __future__ import annotations

import json
import re
from typing import Any

from octavo.errors import RequestError

MAX_SCHEMA = 256 << 10
MAX_DEPTH = 64
MAX_ENUM = 10_000
MAX_REGEX = 4 << 10
HEADER = '%llguidance {"no_forcing": true}\n'
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def _refuse(message: str, param: str) -> RequestError:
    return RequestError(message, param, "invalid_grammar")


def _check_size(value: Any, param: str) -> None:
    """Bounds on nesting and enumerations, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
            elif isinstance(item, list):
                below += item
            if isinstance(item, dict) and len(item.get("enum") or ()) > MAX_ENUM:
                raise _refuse(f"an enum has over {MAX_ENUM} values", param)
        if not below:
            return
        level = below
    raise _refuse(f"the schema nests deeper than {MAX_DEPTH} levels", param)


def json_text(schema: Any, param: str) -> str:
    """A schema as the `%json` term of a Lark grammar. Raises RequestError naming `param`."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _refuse("a JSON schema is an object", param)
    _check_size(schema, param)
    style = schema.get("x-guidance", {})
    if not isinstance(style, dict):
        raise _refuse("x-guidance is an object", param)
    try:
        text = json.dumps(schema | {"x-guidance": JSON_STYLE | style}, allow_nan=False)
    except ValueError:
        raise _refuse("a JSON schema holds no NaN or infinity", param) from None
    if len(text) > MAX_SCHEMA:
        raise _refuse(f"the schema has {len(text)} characters; {MAX_SCHEMA} at most", param)
    return f"%json {text}"


def from_schema(schema: Any, param: str = "response_format") -> str:
    """A grammar of the JSON texts that satisfy a schema."""
    return f"{HEADER}start: {json_text(schema, param)}"


def from_regex(pattern: str, param: str = "structured_outputs") -> str:
    """A grammar of the texts that a regular expression matches from end to end."""
    if not 0 < len(pattern) <= MAX_REGEX:
        raise _refuse(f"a regular expression has 1 to {MAX_REGEX} characters", param)
    plain = {"/": r"\/", "\n": r"\n"}
    quoted = re.sub(
        r"\\.|/|\n", lambda m: plain.get(m.group(), m.group()), pattern, flags=re.DOTALL
    )
    return f"{HEADER}start: /{quoted}/"


def from_choice(choices: list[str], param: str = "structured_outputs") -> str:
    """A grammar of exactly these texts."""
    if not 0 < len(choices) <= MAX_ENUM or not all(choices):
        raise _refuse(f"choice takes 1 to {MAX_ENUM} texts that are not empty", param)
    return f"{HEADER}start: " + " | ".join(map(json.dumps, choices))


def from_grammar(text: str, param: str = "structured_outputs") -> str:
    """A grammar in Lark's notation, or in llama.cpp's (GBNF, told by its `::=`)."""
    if not 0 < len(text) <= MAX_SCHEMA:
        raise _refuse(f"a grammar has 1 to {MAX_SCHEMA} characters", param)
    if "::=" in text:
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            text = any_to_lark(text)
        except Exception as e:  # what it raises is not documented
            reason = (str(e).splitlines() or [""])[0][:120]
            raise _refuse(f"the grammar cannot be read: {reason}", param) from None
    text = text.lstrip().removeprefix("%llguidance {}")
    return text if text.startswith("%llguidance") else HEADER + text


def after_thoughts(grammar: str, opening: str, closing: str, inside: bool) -> str:
    """A grammar whose texts may follow a model's thoughts.

    opening, closing: the terms that stand for the markers. inside: the prompt opens the thoughts,
    so that they cannot be left out.
    """
    head = "thoughts" if inside else f"({opening} thoughts)?"
    if closing.startswith("<["):
        thoughts = f"thoughts: THOUGHTS {closing} SPACE?\nTHOUGHTS: /(.|\\n)*/"
    else:
        thoughts = f"thoughts: closed SPACE?\nclosed[lazy]: /(.|\\n)*/ {closing}"
    answer = re.sub(r"(?m)^start\s*:", "answer:", grammar, count=1)
    return f"{answer}\nstart: {head} answer\n{thoughts}\nSPACE: /\\s+/"
