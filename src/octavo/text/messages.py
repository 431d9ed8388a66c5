"""Conversations and tools as chat templates take them. All APIs translate to these."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.errors import InvalidValue, RequestError

JsonObject = dict[str, Any]
IMAGES = ("image_url", "image")  # parts that hold pictures; the second is Python's
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
VIDEOS = ("video_url", "video")  # a URL of a file; also a list of frames


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """Text in a message."""

    text: str


class ImagePart(msgspec.Struct, frozen=True, tag="image"):
    """A picture in a message, not looked at yet.

    source: a URL, or {"url", "detail"} as OpenAI's API has it; in Python also a file's bytes or its
    Path, or a PIL.Image. at: the field it came in.
    """

    source: Any
    at: str


class VideoPart(msgspec.Struct, frozen=True, tag="video"):
    """A video in a message, not looked at yet.

    source: a URL, {"url"}, or a list of its frames, each as an ImagePart has it; in Python also a
    file's bytes or its Path. fps: frames a second that are shown, and that a list has. at: the
    field it came in.
    """

    source: Any
    at: str
    fps: Any = None


Part = TextPart | ImagePart | VideoPart  # the kinds of content that messages may hold


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the assistant made. id: None if it has none."""

    name: str
    arguments: JsonObject
    id: str | None = None


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation.

    content: None if there is none, which templates may tell from empty content. reasoning: the
    assistant's thoughts. tool_call_id: the call that a tool's message answers. name: of its author.
    extra: further keys that a template may read.
    """

    role: str
    content: tuple[Part, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    tool_call_id: str | None = None
    name: str | None = None
    extra: JsonObject = {}

    @property
    def text(self) -> str:
        """The text of all parts."""
        return "".join(p.text for p in self.content or () if isinstance(p, TextPart))

    @property
    def media(self) -> list[ImagePart | VideoPart]:
        """The pictures and videos, in their order."""
        return [p for p in self.content or () if not isinstance(p, TextPart)]


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call.

    parameters, returns: JSON Schemas of its arguments and its result. strict: calls have to follow
    the schema.
    """

    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    returns: JsonObject | None = None
    strict: bool = False


def message(role: str, text: str) -> Message:
    """A message that is only text."""
    return Message(role, (TextPart(text),))


def read_messages(given: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages from dicts such as {"role": "user", "content": "Hello"}. Raises RequestError.

    They have the keys of OpenAI's API. Arguments of calls may be objects or JSON text. Keys and
    roles that are not known are passed on to the template, which has system for developer.
    """
    return [_message(f"messages[{i}]", m) for i, m in enumerate(given)]


def read_tools(given: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Tools from dicts {"type": "function", "function": {...}}. Raises RequestError."""
    return [_tool(f"tools[{i}]", tool) for i, tool in enumerate(given)]


def _message(at: str, given: Mapping[str, Any]) -> Message:
    if not isinstance(given, Mapping):
        raise InvalidValue(f"{at} is not an object", at)
    rest = {k: v for k, v in given.items() if v is not None}
    role = rest.pop("role", None)
    if not isinstance(role, str):
        raise InvalidValue(f"{at}.role is not a string", f"{at}.role")
    if role != "assistant" and given.get("tool_calls"):
        raise InvalidValue(f"{at}: only the assistant calls tools", f"{at}.tool_calls")
    refusal = rest.pop("refusal", None) if role == "assistant" else None
    content = _content(at, rest.pop("content", refusal))
    calls = rest.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise InvalidValue(f"{at}.tool_calls is not a list", f"{at}.tool_calls")
    made = tuple(_call(f"{at}.tool_calls[{i}]", call) for i, call in enumerate(calls))
    names = [n for n in ("reasoning_content", "reasoning") if n in rest]  # the second: vLLM's later
    thoughts = [_string(at, rest, name) for name in names]
    return Message(
        "system" if role == "developer" else role, content, made,
        reasoning=next(filter(None, thoughts), None),
        tool_call_id=_string(at, rest, "tool_call_id"),
        name=_string(at, rest, "name"),
        extra=rest,
    )  # fmt: skip


def _string(at: str, rest: JsonObject, key: str) -> str | None:
    """Takes `key` out of `rest`."""
    value = rest.pop(key, None)
    if value is not None and not isinstance(value, str):
        raise InvalidValue(f"{at}.{key} is not a string", f"{at}.{key}")
    return value


def _content(at: str, given: Any) -> tuple[Part, ...] | None:
    if given is None:
        return None
    parts = [{"type": "text", "text": given}] if isinstance(given, str) else given
    if not isinstance(parts, list):
        raise InvalidValue(f"{at}.content is neither text nor a list", f"{at}.content")
    return tuple(_part(f"{at}.content[{i}]", part) for i, part in enumerate(parts))


def _part(at: str, given: Any) -> Part:
    kind = given.get("type") if isinstance(given, dict) else type(given).__name__
    if kind in IMAGES and isinstance(given, dict):
        return ImagePart(given.get(kind), f"{at}.{kind}")
    if kind in VIDEOS and isinstance(given, dict):
        return VideoPart(given.get(kind), f"{at}.{kind}", given.get("fps"))
    if kind not in ("text", "refusal") or not isinstance(given, dict):
        raise RequestError(
            f"{at} is of type {str(kind)[:32]!r}; text, image_url and video_url are taken",
            f"{at}.type", "unsupported_parameter",
        )  # fmt: skip
    if not isinstance(given.get(kind), str):
        raise InvalidValue(f"{at}.{kind} is not a string", f"{at}.{kind}")
    return TextPart(given[kind])


def text_only(at: str, kind: Any) -> RequestError:
    """The refusal of a part that is no text."""
    return RequestError(
        f"{at}: this model takes text only, not {str(kind)[:32]!r} parts",
        f"{at}.type", "unsupported_parameter",
    )  # fmt: skip


def _call(at: str, given: Any) -> ToolCall:
    call = given if isinstance(given, dict) else {}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidValue(f"{at}.function.name is not a string", f"{at}.function.name")
    arguments = call_arguments(f"{at}.function.arguments", function.get("arguments", {}))
    return ToolCall(function["name"], arguments, _string(at, dict(call), "id"))


def call_arguments(name: str, given: Any) -> JsonObject:
    """A call's arguments, given as JSON text or as an object. Raises RequestError naming `name`."""
    value = given
    if isinstance(given, str):
        try:
            value = msgspec.json.decode(given or "{}")
        except (msgspec.DecodeError, ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise InvalidValue(f"{name} is not a JSON object", name)
    return value


def _tool(at: str, given: Mapping[str, Any]) -> Tool:
    if isinstance(given, Mapping) and given.get("type", "function") != "function":
        raise InvalidValue(f"{at}.type is not function", f"{at}.type")
    try:
        function = dict(given["function"])
        function["returns"] = function.pop("return", None)
        function["strict"] = bool(function.get("strict"))
        return msgspec.convert(function, Tool)
    except (AttributeError, KeyError, TypeError, ValueError, msgspec.ValidationError):
        raise InvalidValue(
            f'{at} is not {{"type": "function", "function": {{"name": ...}}}}', at
        ) from None


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Messages whose calls and results have ids of nine letters and digits: their own or what is
    made of them. Where there are none, calls are numbered, and results follow them in order."""
    out: list[Message] = []
    calls: list[str | None] = []
    for i, m in enumerate(messages):
        if m.tool_calls:
            made = tuple(
                msgspec.structs.replace(c, id=_short_id(c.id or f"{i}.{j}"))
                for j, c in enumerate(m.tool_calls)
            )
            m, calls = msgspec.structs.replace(m, tool_calls=made), [c.id for c in made]
        elif m.role == "tool":
            own = _short_id(m.tool_call_id) if m.tool_call_id else None
            answered = own or next(iter(calls), None)
            calls = [c for c in calls if c != answered]
            m = msgspec.structs.replace(m, tool_call_id=answered)
        out.append(m)
    return out


def _short_id(given: str) -> str:
    if SHORT_ID.fullmatch(given):
        return given
    return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:9]


def message_variables(message: Message, parts: bool = False, mark: str = "") -> JsonObject:
    """A message as templates take it: OpenAI's keys, and no key without a value.

    parts: content is a list of parts, as templates for pictures read it, else it is text. mark: a
    line of that text which stands for a picture or a video.
    """
    calls = [
        ({} if c.id is None else {"id": c.id}) | {"type": "function", "function": call_variables(c)}
        for c in message.tool_calls
    ]
    content: Any = message.text
    if mark and message.media:
        lines = (p.text if isinstance(p, TextPart) else mark for p in message.content or ())
        content = "\n".join(lines)
    if parts:
        content = [
            {"type": "text", "text": p.text}
            if isinstance(p, TextPart)
            else {"type": "video" if isinstance(p, VideoPart) else "image"}
            for p in message.content or ()
        ]
    values = {
        "role": message.role,
        "content": None if message.content is None else content,
        "tool_calls": calls or None,
        "reasoning_content": message.reasoning,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
    return {k: v for k, v in values.items() if v is not None} | message.extra


def call_variables(call: ToolCall) -> JsonObject:
    return {"name": call.name, "arguments": call.arguments}


def tool_variables(tool: Tool) -> JsonObject:
    """A tool as templates take it, without keys that have no value."""
    values = {
        "name": tool.name, "description": tool.description, "parameters": tool.parameters,
        "return": tool.returns,
    }  # fmt: skip
    return {"type": "function", "function": {k: v for k, v in values.items() if v is not None}}
