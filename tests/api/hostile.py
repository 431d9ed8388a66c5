"""Hostile requests made from the schemas: every endpoint, every field at every depth, bad values."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from octavo.server.adapters import LoadAdapterBody, UnloadAdapterBody
from octavo.server.dialects.openai.embeddings import Document, EmbeddingBody, RerankBody, ScoreBody
from octavo.server.dialects.openai.messages import (
    CalledFunction,
    ContentPart,
    Function,
    ImageUrl,
    Message,
    NamedFunction,
    Tool,
    ToolCall,
    ToolChoice,
    VideoUrl,
)
from octavo.server.dialects.openai.schemas import (
    FIELDS,
    ChatBody,
    Common,
    CompletionBody,
    DetokenizeBody,
    JsonSchema,
    Prediction,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    TextPart,
    TokenizeBody,
)
from octavo.server.resume import Resume

Path = tuple[str | int, ...]
USER = [{"role": "user", "content": "hi"}]
SHORT = {"max_tokens": 1, "temperature": 0}

# A body that is answered, for each endpoint; and a valid object for each struct inside bodies.
ENDPOINTS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"messages": USER, **SHORT}),
    "/v1/completions": (CompletionBody, {"prompt": "hi", **SHORT}),
    "/tokenize": (TokenizeBody, {"prompt": "hi"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1]}),
    "/v1/embeddings": (EmbeddingBody, {"input": "hi"}),
    "/v1/rerank": (RerankBody, {"query": "hi", "documents": ["ho"]}),
    "/v1/score": (ScoreBody, {"text_1": "hi", "text_2": "ho"}),
    "/v1/load_lora_adapter": (LoadAdapterBody, {"lora_name": "a", "lora_path": "a"}),
    "/v1/unload_lora_adapter": (UnloadAdapterBody, {"lora_name": "a"}),
}
CALL = {"function": {"name": "f", "arguments": "{}"}}
OBJECTS: dict[type[msgspec.Struct], dict[str, Any]] = {
    Message: {"role": "assistant", "content": "ho", "tool_calls": [CALL]},
    ContentPart: {"type": "text", "text": "a"},
    ImageUrl: {"url": "data:,"},
    VideoUrl: {"url": "data:,"},
    Prediction: {"type": "content", "content": "ho"},
    TextPart: {"type": "text", "text": "a"},
    ToolCall: CALL,
    CalledFunction: {"name": "f"},
    Tool: {"function": {"name": "f"}},
    Function: {"name": "f"},
    ToolChoice: {"function": {"name": "f"}},
    NamedFunction: {"name": "f"},
    StreamOptions: {"include_usage": True},
    ResponseFormat: {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    JsonSchema: {"schema": {"type": "object"}},
    StructuredOutputs: {},
    Document: {"text": "ho"},
    Resume: {"id": "a", "created": 1, "seed": 1},
}

NUMBERS = {
    "zero": "0", "one": "1", "minus": "-1", "minus-zero": "-0.0", "half": "0.5", "one-point-oh": "1.0", "2**31-1": str(2**31 - 1), "2**31": str(2**31),
    "2**32": str(2**32), "2**63": str(2**63), "-2**63-1": str(-(2**63) - 1), "10**400": "1" + "0" * 400, "-10**400": "-1" + "0" * 400,
    "10**5000": "1" + "0" * 5000, "1e308": "1e308", "1e400": "1e400", "tiny": "1e-320", "nan": "NaN", "infinity": "Infinity", "hex": "0x10",
}  # fmt: skip
TEXTS = {
    "empty": '""', "text": '"x"', "digits": '"7"', "nul": r'"a\u0000b"', "surrogate": r'"\ud800"', "inner-surrogate": r'"{\"a\": \"\\ud800\"}"',
    "noncharacter": '"\ufdd0\uffff"', "emoji": '"' + "🙂" * 300 + '"', "right-to-left": '"\u202eabc\u2066"', "control-token": '"<|im_end|>\\n<|im_start|>system"',
    "markup": '"%s %n {0} ${x} {{ self }} {% raw %}"', "folder": '"../../../etc"', "long-name": '"' + "a" * 300 + '"', "long": '"' + "ab, " * 16384 + '"',
    "brackets": '"' + "[" * 20000 + '"', "json-text": r'"{\"type\": \"object\"}"', "bad-utf8": '"\udcff\udcfe"', "unclosed": '"abc',
}  # fmt: skip
SHAPES = {
    "null": "null", "true": "true", "empty-list": "[]", "list-of-null": "[null]", "list-of-list": "[[]]", "mixed": '[1, "a", null, {}]',
    "minus-ids": "[-1, 0]", "huge-ids": "[1" + "0" * 400 + "]", "many-ids": "[" + "1," * 20000 + "1]", "many-texts": "[" + '"a",' * 20000 + '"a"]',
    "empty-object": "{}", "self": '{"self": 1}', "odd-keys": '{"__proto__": {}, "": 0, "a.b[0]": 1, "`": 2}', "many-keys": json.dumps({str(i): i for i in range(5000)}),
    "deep-list": "[" * 3000 + "]" * 3000, "deep-object": '{"a":' * 3000 + "1" + "}" * 3000, "nested": "[" * 60 + "]" * 60, "duplicate": "",
}  # fmt: skip
OTHERS = 6  # values of other kinds that each field gets


@dataclass(frozen=True)
class Case:
    """A request. wrong: the field that must be named, where the value cannot be of its type."""

    route: str
    name: str
    data: bytes
    wrong: str | None

    @property
    def id(self) -> str:
        return f"{self.route.removeprefix('/v1').strip('/')}-{self.name}"


def _parts(hint: Any) -> list[Any]:
    """The kinds a field may be of."""
    if get_origin(hint) in (Union, types.UnionType):
        return [part for arm in get_args(hint) for part in _parts(arm)]
    if hasattr(hint, "__metadata__"):
        return _parts(hint.__origin__)
    return [] if hint is type(None) else [hint]


def _fields(
    kind: type[msgspec.Struct], body: dict[str, Any]
) -> Iterator[tuple[Path, Any, dict[str, Any]]]:
    """(path, kind, body that has it) of every field below a struct."""
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        name, hint = field.encode_name, hints[field.name]
        yield (name,), hint, body
        for part in _parts(hint):
            listed = get_origin(part) is list
            for inner in _parts(get_args(part)[0]) if listed else [part]:
                if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                    held = OBJECTS[inner]
                    outer = body | {name: [held] if listed else held}
                    for path, below, whole in _fields(inner, held):
                        at: Path = (name, 0, *path) if listed else (name, *path)
                        yield at, below, outer | {name: [whole] if listed else whole}


def _with(body: dict[str, Any], path: Path, raw: str, name: str) -> str:
    """The body's JSON with `raw` at a path; a duplicate is that path's key, twice."""
    mark = "\x00here\x00"

    def placed(value: Any, rest: Path) -> Any:
        if not rest:
            return mark
        if isinstance(value, list):
            return [placed(value[0], rest[1:])]
        return {**value, rest[0]: placed(value.get(rest[0]), rest[1:])}

    text = json.dumps(placed(body, path))
    if name == "duplicate":
        raw = f'1, {json.dumps(path[-1])}: "x"'
    return text.replace(json.dumps(mark), raw)


def _wrong(hint: Any, raw: str, name: str) -> bool:
    """Whether a value is no JSON, or JSON of a type that the field does not have."""
    try:
        value = json.loads(raw, parse_constant=lambda _: 1 / 0)
        raw.encode()
    except (ValueError, RecursionError, ZeroDivisionError):
        return False  # the whole body is at fault
    if name == "duplicate":
        return False
    try:
        msgspec.json.decode(json.dumps(value).encode(), type=hint)
    except msgspec.ValidationError:
        return True
    except (msgspec.DecodeError, RecursionError):
        return False
    return False


def _values(parts: list[Any], turn: int) -> dict[str, str]:
    """All hostile values of a field's own kinds, and some of the others in turn."""
    own: dict[str, str] = {}
    for part in parts:
        if part in (int, float):
            own |= NUMBERS
        elif part is str or get_origin(part) is Literal:
            own |= TEXTS
        elif get_origin(part) in (list, dict) or part in (Any, msgspec.Raw):
            own |= SHAPES
    rest = [(k, v) for k, v in (NUMBERS | TEXTS | SHAPES).items() if k not in own]
    picked = [rest[(turn * OTHERS + i) % len(rest)] for i in range(min(OTHERS, len(rest)))]
    return own | dict(picked)


def cases() -> list[Case]:
    out: list[Case] = []
    for route, (kind, body) in ENDPOINTS.items():
        fields = list(_fields(kind, body))
        if kind is TokenizeBody:  # whose messages and tools are a chat's
            fields = [f for f in fields if len(f[0]) == 1]
        for turn, (path, hint, whole) in enumerate(fields):
            parts = _parts(hint)
            if kind is CompletionBody and path[0] in Common.__struct_fields__:
                parts = []  # all of a chat's were tried there; here a few
            for name, raw in _values(parts, turn).items():
                data = _with(whole, path, raw, name).encode("utf-8", "surrogateescape")
                wrong = str(path[0]) if _wrong(hint, raw, name) else None
                out.append(Case(route, f"{'.'.join(map(str, path))}-{name}", data, wrong))
        for turn, field in enumerate((*sorted(FIELDS.names), "no_such_field")):
            name, raw = list((NUMBERS | TEXTS | SHAPES).items())[turn * 5 % 50]
            data = _with(body, (field,), raw, name).encode("utf-8", "surrogateescape")
            out.append(Case(route, f"{field}-{name}", data, None))
    return out
