"""Conversations and tools as requests give them, checked and made ready for chat templates."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.errors import RequestError

MAX_MESSAGES = 4096
MAX_TOOLS = 128
ROLES = ("system", "developer", "user", "assistant", "tool")
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class ToolCall(msgspec.Struct):
    function: CalledFunction
    id: str = ""
    type: str = "function"


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    function: Function
    type: str = "function"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request wants of tools. told: those in the prompt; callable: those it may call."""

    told: list[dict[str, Any]]
    callable: list[dict[str, Any]]
    required: bool
    strict: bool
    parallel: bool


def _invalid(message: str, param: str) -> RequestError:
    return RequestError(message, param, "invalid_value")


def _tool(tool: Tool) -> dict[str, Any]:
    function = tool.function
    if tool.type != "function" or not NAME.fullmatch(function.name):
        raise _invalid(
            "a tool has type function and a name of 1 to 64 letters, digits, '_', '.' and '-'",
            "tools",
        )
    fields = {"name": function.name, "description": function.description,
              "parameters": function.parameters}  # fmt: skip
    return {"type": "function", "function": {k: v for k, v in fields.items() if v is not None}}


def tool_use(
    tools: list[Tool] | None, choice: str | dict[str, Any] | None, parallel: bool | None
) -> ToolUse | None:
    """Tools and tool_choice, checked; None without tools. Raises RequestError."""
    given = tools or []
    names = [t.function.name for t in given]
    if len(given) > MAX_TOOLS or len(set(names)) < len(names):
        raise _invalid(f"tools takes up to {MAX_TOOLS} functions of different names", "tools")
    told = [_tool(t) for t in given]
    named = None
    if isinstance(choice, dict):
        function = choice.get("function")
        named = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or named not in names:
            raise _invalid("tool_choice names none of the tools", "tool_choice")
    elif choice not in (None, "none", "auto", "required"):
        raise _invalid("tool_choice is none, auto, required or a function", "tool_choice")
    if choice == "required" and not given:
        raise _invalid("tool_choice is required, but there are no tools", "tool_choice")
    if choice == "none" or not given:
        return ToolUse(told, [], False, False, False) if given else None
    usable = [t for t in told if named in (None, t["function"]["name"])]
    strict = any(t.function.strict for t in given)
    several = parallel is not False and named is None
    return ToolUse(told, usable, choice == "required" or named is not None, strict, several)


def conversation(given: list[Message] | None) -> list[dict[str, Any]]:
    """Messages for the template: roles checked, text parts joined. Raises RequestError."""
    messages = given or []
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise _invalid(
            f"messages has {len(messages)} entries; 1 to {MAX_MESSAGES} are taken", "messages"
        )
    out = []
    for i, m in enumerate(messages):
        if m.role not in ROLES:
            raise _invalid(
                f"messages[{i}].role is {m.role[:32]!r}; it may be {', '.join(ROLES)}", "messages"
            )
        role = "system" if m.role == "developer" else m.role
        message: dict[str, Any] = {"role": role, "content": _content(i, m)}
        if m.tool_calls:
            if role != "assistant":
                raise _invalid(f"messages[{i}]: only the assistant calls tools", "messages")
            message["tool_calls"] = [_call(i, c) for c in m.tool_calls]
        if m.reasoning_content and role == "assistant":
            message["reasoning_content"] = m.reasoning_content
        if role == "tool":
            if not m.tool_call_id:
                raise _invalid(f"messages[{i}] answers no tool_call_id", "messages")
            message["tool_call_id"] = m.tool_call_id
            if m.name:
                message["name"] = m.name
        out.append(message)
    return out


def _call(i: int, call: ToolCall) -> dict[str, Any]:
    """A call with its arguments as an object, which is what templates take."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise _invalid(f"messages[{i}]: a tool call's arguments are not a JSON object", "messages")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _content(i: int, message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return message.refusal or ""
        raise _invalid(f"messages[{i}].content is missing", "messages")
    texts = []
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise RequestError(
                f"messages[{i}] holds a {part.type[:32]!r} part; this model takes text only",
                "messages",
                "unsupported_parameter",
            )
        texts.append(part.text)
    return "".join(texts)
