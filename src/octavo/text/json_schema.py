"""Prepares JSON Schemas for llguidance: limits, exact formats, no undeclared properties."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import unquote

from octavo.errors import RequestError

MAX_SCHEMA = 256 << 10  # characters
MAX_DEPTH = 64
MAX_ENUM = 10_000
MAX_PATTERN = 4 << 10
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

Schema = dict[str, Any]

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
MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
# What says something about the properties of the object that it stands in.
IN_PLACE = {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas",
            "$ref", "$dynamicRef", "$recursiveRef"}  # fmt: skip
ABOUT_PROPERTIES = {"properties", "patternProperties", "additionalProperties", "required",
                    "unevaluatedProperties", "minProperties", "propertyNames",
                    "dependentRequired"}  # fmt: skip


def refuse(message: str, param: str) -> RequestError:
    """The error for a constraint that cannot be used."""
    return RequestError(message, param, "invalid_grammar")


def json_term(schema: Any, param: str) -> str:
    """A schema as the `%json` term of a Lark grammar. Raises RequestError naming `param`."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise refuse("a JSON schema is an object (no text matches `false`)", param)
    _check_depth(schema, param)
    try:
        length = len(json.dumps(schema, allow_nan=False))
    except ValueError:
        raise refuse("a JSON schema holds no NaN or infinity", param) from None
    if length > MAX_SCHEMA:
        raise refuse(f"the schema has {length} characters; {MAX_SCHEMA} at most", param)
    style = schema.get("x-guidance", {})
    if not isinstance(style, dict):
        raise refuse("x-guidance is an object", param)
    made = close(_exact(schema, param))
    return f"%json {json.dumps(made | {'x-guidance': JSON_STYLE | style})}"


def _check_depth(value: Any, param: str) -> None:
    """Checks limits on nesting and enumerations. Raises RequestError."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
                values = item.get("enum")
                if isinstance(values, list) and len(values) > MAX_ENUM:
                    raise refuse(f"an enum has over {MAX_ENUM} values", param)
            elif isinstance(item, list):
                below += item
        if not below:
            return
        level = below
    raise refuse(f"the schema nests deeper than {MAX_DEPTH} levels", param)


def _exact(schema: Any, param: str) -> Any:
    """A copy whose formats and patterns mean to llguidance what they mean to JSON Schema."""
    if isinstance(schema, list):
        return [_exact(s, param) for s in schema]
    if not isinstance(schema, dict):
        return schema
    out: Schema = {}
    for key, value in schema.items():
        if key in DATA:
            out[key] = value
        elif key in MAPS and isinstance(value, dict):  # its keys are names
            out[key] = {name: _exact(s, param) for name, s in value.items()}
        else:
            out[key] = _exact(value, param)
    if isinstance(pattern := out.get("pattern"), str):
        if len(pattern) > MAX_PATTERN:
            raise refuse(f"a pattern has {len(pattern)} characters; {MAX_PATTERN} at most", param)
        out["pattern"] = _ecma(pattern)
    exact = EXACT_FORMATS.get(out["format"]) if isinstance(out.get("format"), str) else None
    if exact is not None:
        del out["format"]
        also = out.get("allOf", [])
        if "pattern" in out and isinstance(also, list):
            out["allOf"] = [*also, {"pattern": exact}]
        else:
            out["pattern"] = exact
    return out


def _ecma(pattern: str) -> str:
    r"""ECMA 262 counts U+FEFF as white space: outside of classes, \S must not match it."""
    return re.sub(
        r"\\.|\[(?:\\.|[^\]\\])*+(?:\]|\\?\Z)",
        lambda m: r"[^\s\x{FEFF}]" if m.group() == r"\S" else m.group(),
        pattern, flags=re.DOTALL,
    )  # fmt: skip


# -- properties that nobody declared ------------------------------------------------------------

# How a subschema may be changed: closed; not by itself, as others speak of the same object; not at
# all, nor anything in it, as more than what it allows depends on it.
CLOSABLE, JOINED, FIXED = 0, 1, 2


def close(schema: Schema) -> Schema:
    """Forbids, in place, properties that an object schema neither declares nor asks for.

    A model that may invent properties does. What satisfies the result satisfies the schema.
    """
    modes = _modes(schema)
    for mode, part in modes.values():
        declared = part.get("properties")
        if mode != CLOSABLE or not isinstance(declared, dict):
            continue
        others = (ABOUT_PROPERTIES | IN_PLACE) - {"properties", "required", "minProperties"}
        required, least = part.get("required", []), part.get("minProperties", 0)
        known = isinstance(required, list) and all(
            isinstance(r, str) and r in declared for r in required
        )
        enough = isinstance(least, int | float) and least <= len(declared)
        if known and enough and not others & part.keys():
            part["additionalProperties"] = False
    return schema


def _modes(root: Schema) -> dict[int, tuple[int, Schema]]:
    """The subschemas that count, each with the strictest mode of the ways that lead to it.

    Empty where a reference leads to what only a full resolver finds.
    """
    modes: dict[int, tuple[int, Schema]] = {}
    todo: list[tuple[Any, int]] = [(root, CLOSABLE)]
    while todo:
        part, mode = todo.pop()
        if not isinstance(part, dict) or modes.get(id(part), (-1, {}))[0] >= mode:
            continue
        modes[id(part)] = (mode, part)
        if part is not root and (isinstance(part.get("$id", part.get("id")), str)):
            return {}
        speakers = (IN_PLACE | ABOUT_PROPERTIES) & part.keys()
        several = len(speakers) > 1 or mode == JOINED
        for key, value in part.items():
            if key in IN_PLACE:
                fixed = mode == FIXED or not _only_adds(key, value, root)
                own = FIXED if fixed else JOINED if several else CLOSABLE
                if key == "allOf" and isinstance(value, list) and len(value) > 1:
                    own = max(own, JOINED)
                if key == "$ref":
                    target = _resolve(root, value)
                    if target is None:
                        return {}
                    todo.append((target, own))
                todo += [(v, own) for v in _children(key, value)]
            elif key not in DATA and key not in ("$defs", "definitions"):
                own = FIXED if mode == FIXED else CLOSABLE
                todo += [(v, own) for v in _children(key, value)]
    return modes


def _children(key: str, value: Any) -> list[Any]:
    if key in MAPS and isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else [value]


def _only_adds(key: str, value: Any, root: Schema) -> bool:
    """True if restricting the subschemas of a keyword never allows more instances."""
    if key in ("allOf", "anyOf", "$ref"):
        return True
    return key == "oneOf" and isinstance(value, list) and _told_apart(value, root)


def _told_apart(branches: list[Any], root: Schema) -> bool:
    """True if alternatives exclude each other by a constant property that all of them require."""
    tags: list[dict[str, str]] = []
    for branch in branches:
        if isinstance(branch, dict) and isinstance(branch.get("$ref"), str):
            branch = _resolve(root, branch["$ref"])
        if not isinstance(branch, dict) or branch.get("type") != "object":
            return False
        declared, required = branch.get("properties"), branch.get("required")
        if not isinstance(declared, dict) or not isinstance(required, list):
            return False
        known = {name: _tag(declared.get(name)) for name in required if isinstance(name, str)}
        tags.append({name: tag for name, tag in known.items() if tag is not None})
    names = set.intersection(*map(set, tags)) if tags else set()
    return any(len({t[name] for t in tags}) == len(tags) for name in names)


def _tag(schema: Any) -> str | None:
    """The only string that a schema allows (`const` or a single `enum`), else None."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or len(values) != 1 or not isinstance(values[0], str):
        return None
    return values[0]


def _resolve(root: Schema, reference: Any) -> Any:
    """Resolves a JSON pointer within the document. None for other references."""
    if not isinstance(reference, str) or not re.match(r"#(/|$)", reference):
        return None
    part: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and re.fullmatch("[0-9]{1,6}", name) and int(name) < len(part):
            part = part[int(name)]
        elif isinstance(part, dict) and name in part:
            part = part[name]
        else:
            return None
    return part
