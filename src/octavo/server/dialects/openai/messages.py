"""Conversations and tools as OpenAI's bodies give them, for the neutral reader."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from octavo.errors import InvalidValue, RequestError
from octavo.generate.request import NamedTool, read_tool_choice
from octavo.server.bounds import one_of
from octavo.server.sizes import check_nesting
from octavo.text import messages as neutral
from octavo.text.messages import IMAGES, VIDEOS

MAX_MESSAGES = 4096
MAX_PARTS = 1 << 15  # of all messages together
ROLES = ("system", "developer", "user", "assistant", "tool")

# Fields of type Raw below are what clients send back of replies, or for other servers: those of
# `_UNHEARD` are refused unless they are null, the others have no effect.


class ImageUrl(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    detail: str | None = None


class VideoUrl(msgspec.Struct, forbid_unknown_fields=True):
    url: str


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, one_of(("text", "refusal", *IMAGES, *VIDEOS))]
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None
    input_audio: Raw = Raw()
    video_url: VideoUrl | str | None = None
    video: list[str] | str | None = None
    fps: float | None = None
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
    role: Annotated[str, one_of(ROLES)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's later name
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    audio: Annotated[Raw, one_of(())] = Raw()
    function_call: Annotated[Raw, one_of(())] = Raw()
    annotations: Raw = Raw()
    parsed: Raw = Raw()
    cache_control: Raw = Raw()
    provider_specific_fields: Raw = Raw()


_UNHEARD = ("audio", "function_call")
_CONTENT = {"content": {"type": ["string", "array"]}}
# All but the assistant's have content, and a tool's say which call they answer.
AnyMessage = Annotated[
    Message,
    Meta(extra_json_schema={"anyOf": [
        {"properties": {"role": {"const": "assistant"}}},
        {"properties": {"role": {"enum": ["system", "developer", "user"]}, **_CONTENT},
         "required": ["content"]},
        {"properties": {"role": {"const": "tool"}, "tool_call_id": {"type": "string"}, **_CONTENT},
         "required": ["content", "tool_call_id"]},
    ]}),
]  # fmt: skip


class Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    returns: dict[str, Any] | None = msgspec.field(default=None, name="return")


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    function: Function
    type: Annotated[str, one_of(("function",))] = "function"
    cache_control: Raw = Raw()


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    function: NamedFunction
    type: Annotated[str, one_of(("function",))] = "function"


def tools(given: list[Tool] | None) -> list[neutral.Tool]:
    """The functions that a request tells the model of. Raises RequestError."""
    return neutral.read_tools(
        [{"type": t.type, "function": msgspec.to_builtins(t.function)} for t in given or ()]
    )


def tool_choice(given: str | ToolChoice | None) -> str | NamedTool:
    """Which of the tools are to be called. Raises RequestError."""
    return read_tool_choice(msgspec.to_builtins(given) if isinstance(given, ToolChoice) else given)


def conversation(given: list[Message] | None) -> list[neutral.Message]:
    """Messages for the template, with what OpenAI's API asks of them. Raises RequestError."""
    messages = given or []
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidValue(
            f"messages has {len(messages)} entries; 1 to {MAX_MESSAGES} are taken", "messages"
        )
    calls = (c.function.arguments for m in messages for c in m.tool_calls or ())
    check_nesting((text.encode() for text in calls), "messages")
    return neutral.read_messages([_fields(f"messages[{i}]", m) for i, m in enumerate(messages)])


def _fields(at: str, m: Message) -> dict[str, Any]:
    """A message as the neutral reader takes it. Raises RequestError."""
    if m.role not in ROLES:
        raise InvalidValue(
            f"{at}.role is {m.role[:32]!r}; it may be {', '.join(ROLES)}", f"{at}.role"
        )  # fmt: skip
    for name in _UNHEARD:
        if bytes(getattr(m, name)) not in (b"", b"null"):
            name = f"{at}.{name}"
            raise RequestError(f"{name} is not supported here", name, "unsupported_parameter")
    assistant, tool, content = m.role == "assistant", m.role == "tool", m.content
    if content is None:
        if not assistant:
            raise InvalidValue(f"{at}.content is missing", f"{at}.content")
        content = m.refusal or ""
    if tool and not m.tool_call_id:
        raise InvalidValue(f"{at} answers no tool_call_id", f"{at}.tool_call_id")
    parts = content if isinstance(content, str) else [
        {"type": p.type, "text": p.text, "refusal": p.refusal,
         "image_url": msgspec.to_builtins(p.image_url),
         "video_url": msgspec.to_builtins(p.video_url), "video": p.video, "fps": p.fps}
        for p in content
    ]  # fmt: skip
    calls = [
        {"id": c.id or "", "function": {"name": c.function.name, "arguments": c.function.arguments}}
        for c in m.tool_calls or ()
    ]
    return {
        "role": m.role,
        "content": parts,
        "tool_calls": calls,
        "reasoning_content": (m.reasoning_content or m.reasoning or None) if assistant else None,
        "tool_call_id": m.tool_call_id if tool else None,
        "name": m.name or None,
    }
