"""Conversations and tools as requests give them, checked and made ready for chat templates."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from octavo.errors import InvalidValue, RequestError
from octavo.generate.request import NamedTool
from octavo.server.sizes import check_nesting
from octavo.text import messages as neutral

MAX_MESSAGES = 4096
MAX_PARTS = 1 << 15  # of all messages together
ROLES = ("system", "developer", "user", "assistant", "tool")

# Fields of type Raw below are what clients send back of replies, or for other servers: those of
# `_UNHEARD` are refused unless they are null, the others have no effect.


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Raw = Raw()
    input_audio: Raw = Raw()
    video_url: Raw = Raw()
    file: Raw = Raw()
    annotations: Raw = Raw()
    cache_control: Raw = Raw()


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str = "{}"
    parsed_arguments: Raw = Raw()


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    function: CalledFunction
    id: str | None = None
    type: str | None = "function"
    index: Raw = Raw()
    cache_control: Raw = Raw()


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's later name
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    audio: Raw = Raw()
    function_call: Raw = Raw()
    annotations: Raw = Raw()
    parsed: Raw = Raw()
    cache_control: Raw = Raw()
    provider_specific_fields: Raw = Raw()


_UNHEARD = ("audio", "function_call")


class Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    returns: dict[str, Any] | None = msgspec.field(default=None, name="return")


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    function: Function
    type: str = "function"
    cache_control: Raw = Raw()


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    function: NamedFunction
    type: str = "function"


def tools(given: list[Tool] | None) -> list[neutral.Tool]:
    """The functions that a request tells the model of. Raises RequestError."""
    return [_tool(i, tool) for i, tool in enumerate(given or ())]


def _tool(i: int, tool: Tool) -> neutral.Tool:
    function = tool.function
    if tool.type != "function":
        raise InvalidValue(f"tools[{i}].type is not function", f"tools[{i}].type")
    return neutral.Tool(
        function.name, function.description, function.parameters, function.returns,
        bool(function.strict),
    )  # fmt: skip


def tool_choice(given: str | ToolChoice | None) -> str | NamedTool:
    """Which of the tools are to be called. Raises RequestError."""
    if not isinstance(given, ToolChoice):
        return given or "auto"
    if given.type != "function":
        raise InvalidValue("tool_choice names none of the tools", "tool_choice")
    return NamedTool(given.function.name)


def conversation(given: list[Message] | None) -> list[neutral.Message]:
    """Messages for the template: roles checked, text parts joined. Raises RequestError."""
    messages = given or []
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidValue(
            f"messages has {len(messages)} entries; 1 to {MAX_MESSAGES} are taken", "messages"
        )
    calls = (c.function.arguments for m in messages for c in m.tool_calls or ())
    check_nesting((text.encode() for text in calls), "messages")
    return [_message(f"messages[{i}]", m) for i, m in enumerate(messages)]


def _message(at: str, m: Message) -> neutral.Message:
    if m.role not in ROLES:
        raise InvalidValue(
            f"{at}.role is {m.role[:32]!r}; it may be {', '.join(ROLES)}", f"{at}.role"
        )  # fmt: skip
    for name in _UNHEARD:
        if bytes(getattr(m, name)) not in (b"", b"null"):
            name = f"{at}.{name}"
            raise RequestError(f"{name} is not supported here", name, "unsupported_parameter")
    role = "system" if m.role == "developer" else m.role
    content = _content(at, m)
    if m.tool_calls and role != "assistant":
        raise InvalidValue(f"{at}: only the assistant calls tools", f"{at}.tool_calls")
    calls = tuple(_call(f"{at}.tool_calls[{i}]", c) for i, c in enumerate(m.tool_calls or ()))
    if role == "tool" and not m.tool_call_id:
        raise InvalidValue(f"{at} answers no tool_call_id", f"{at}.tool_call_id")
    return neutral.Message(
        role,
        content,
        calls,
        reasoning=(m.reasoning_content or m.reasoning or None) if role == "assistant" else None,
        tool_call_id=m.tool_call_id if role == "tool" else None,
        name=m.name or None,
    )


def _call(at: str, call: ToolCall) -> neutral.ToolCall:
    arguments = neutral.call_arguments(at, call.function.arguments)
    return neutral.ToolCall(call.function.name, arguments, call.id or "")


def _content(at: str, message: Message) -> tuple[neutral.Part, ...]:
    given = message.content
    if given is None:
        if message.role != "assistant":
            raise InvalidValue(f"{at}.content is missing", f"{at}.content")
        given = message.refusal or ""
    if isinstance(given, str):
        return (neutral.TextPart(given),)
    return tuple(_part(f"{at}.content[{i}]", part) for i, part in enumerate(given))


def _part(at: str, part: ContentPart) -> neutral.Part:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in ("text", "refusal") or text is None:
        raise RequestError(
            f"{at} is a {part.type[:32]!r} part; this model takes text only",
            f"{at}.type", "unsupported_parameter",
        )  # fmt: skip
    return neutral.TextPart(text)
