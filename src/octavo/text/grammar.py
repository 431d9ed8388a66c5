"""JSON schemas, regular expressions, choices and grammars as the one form engines take: Lark.

The dialect is llguidance's. JSON is written on one line with ", " and ": " between its parts (a
schema's own `x-guidance` may say otherwise), so a model cannot lose itself in white space.
llguidance itself forces nothing: what is forced is tokenized in octavo.engine.canonical.
"""

from __future__ import annotations

import json
import re
from typing import Any

from octavo.text.json_schema import MAX_ENUM, MAX_SCHEMA, json_term, refuse

MAX_REGEX = 4 << 10
HEADER = '%llguidance {"no_forcing": true}\n'


def from_schema(schema: Any, param: str = "response_format") -> str:
    """A grammar of the JSON texts that satisfy a schema."""
    return f"{HEADER}start: {json_term(schema, param)}"


def from_regex(pattern: str, param: str = "structured_outputs") -> str:
    """A grammar of the texts that a regular expression matches from end to end."""
    if not 0 < len(pattern) <= MAX_REGEX:
        raise refuse(f"a regular expression has 1 to {MAX_REGEX} characters", param)
    plain = {"/": r"\/", "\n": r"\n"}
    quoted = re.sub(
        r"\\.|/|\n", lambda m: plain.get(m.group(), m.group()), pattern, flags=re.DOTALL
    )
    return f"{HEADER}start: /{quoted}/"


def from_choice(choices: list[str], param: str = "structured_outputs") -> str:
    """A grammar of exactly these texts."""
    if not 0 < len(choices) <= MAX_ENUM or not all(choices):
        raise refuse(f"choice takes 1 to {MAX_ENUM} texts that are not empty", param)
    if sum(map(len, choices)) > MAX_SCHEMA:
        raise refuse(f"the choices have over {MAX_SCHEMA} characters", param)
    return f"{HEADER}start: " + " | ".join(map(json.dumps, choices))


def from_grammar(text: str, param: str = "structured_outputs") -> str:
    """A grammar in Lark's notation, or in llama.cpp's (GBNF, told by its `::=`)."""
    if not 0 < len(text) <= MAX_SCHEMA:
        raise refuse(f"a grammar has 1 to {MAX_SCHEMA} characters", param)
    if "::=" in text:
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            text = any_to_lark(text)
        except Exception as e:  # what it raises is not documented
            reason = (str(e).splitlines() or [""])[0][:120]
            raise refuse(f"the grammar cannot be read: {reason}", param) from None
    options, text = _options(text.lstrip(), param)
    return f"%llguidance {json.dumps(options | {'no_forcing': True})}\n{text}"


def _options(text: str, param: str) -> tuple[dict[str, Any], str]:
    """(llguidance options of a grammar's first line, the rest of the grammar)."""
    first, _, rest = text.partition("\n")
    if not first.startswith("%llguidance"):
        return {}, text
    try:
        options = json.loads(first.removeprefix("%llguidance"))
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise refuse("%llguidance is followed by an object on one line", param)
    return options, rest


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
    options, _, rules = grammar.partition("\n")  # nested: its rules may have any names
    answer = f"answer: %lark {{\n{rules}\n}}"
    return f"{options}\nstart: {head} answer\n{answer}\n{thoughts}\nSPACE: /\\s+/"
