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


_YEAR, _DAY28 = r"[0-9]{4}", r"(0[1-9]|1[0-9]|2[0-8])"
_LEAP = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = (
    rf"({_YEAR}-(01|0[3-9]|1[0-2])-({_DAY28}|29|30)|{_YEAR}-(0[13578]|1[02])-31"
    rf"|{_YEAR}-02-{_DAY28}|{_LEAP}-02-29)"
)
_HOUR = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](\.[0-9]+)?(Z|[+-]{_HOUR})"
# Formats whose usual patterns let through days and seconds that do not exist.
EXACT_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
DATA = {"const", "enum", "default", "examples"}  # whose values are no schemas


def _exact(schema: Any) -> Any:
    """A schema whose formats and patterns mean to llguidance what they mean to JSON Schema."""
    if isinstance(schema, list):
        return [_exact(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    out = {k: v if k in DATA else _exact(v) for k, v in schema.items()}
    if isinstance(pattern := out.get("pattern"), str):
        out["pattern"] = _ecma(pattern)
    exact = EXACT_FORMATS.get(out["format"]) if isinstance(out.get("format"), str) else None
    if exact is not None:
        del out["format"]
        if "pattern" in out:
            out["allOf"] = [*out.get("allOf", []), {"pattern": exact}]
        else:
            out["pattern"] = exact
    return out


def _ecma(pattern: str) -> str:
    r"""ECMA 262 counts U+FEFF as white space: outside of classes, \S must not match it."""
    return re.sub(
        r"\\.|\[(?:\\.|[^\]\\])*\]",
        lambda m: r"[^\s\x{FEFF}]" if m.group() == r"\S" else m.group(),
        pattern, flags=re.DOTALL,
    )  # fmt: skip


def json_text(schema: Any, param: str) -> str:
    """A schema as the `%json` term of a Lark grammar. Raises RequestError naming `param`."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _refuse("a JSON schema is an object (no text matches `false`)", param)
    _check_size(schema, param)
    style = schema.get("x-guidance", {})
    if not isinstance(style, dict):
        raise _refuse("x-guidance is an object", param)
    try:
        text = json.dumps(_exact(schema) | {"x-guidance": JSON_STYLE | style}, allow_nan=False)
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
