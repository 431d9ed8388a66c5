"""Request bodies of Anthropic's API. Every field is obeyed, ignored, or refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from octavo.server.bounds import entries, sampling
from octavo.server.parsing import Fields
from octavo.server.sizes import AtMost, Entries

MAX_MESSAGES = 4096
MAX_PARTS = 1 << 15  # of all messages together
KIB = 1 << 10

FIELDS = Fields(
    ignored=frozenset({"metadata", "service_tier", "inference_geo", "cache_control"}),
    unsupported={
        "container": (),
        "context_management": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
    },
)

Count = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


class _Block(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of type Raw have no effect: prefixes are cached without being told to."""

    cache_control: Raw = Raw()


class Text(_Block, tag="text"):
    text: str
    citations: Raw = Raw()


class Base64Source(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="base64"):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str

    @property
    def location(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="url"):
    url: str

    @property
    def location(self) -> str:
        return self.url


class Image(_Block, tag="image"):
    source: Base64Source | UrlSource


class Thinking(_Block, tag="thinking"):
    thinking: str
    signature: Raw = Raw()


class RedactedThinking(_Block, tag="redacted_thinking"):
    data: str


class ToolUse(_Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: Raw = Raw()


class ToolResult(_Block, tag="tool_result"):
    """is_error has no effect: the content says what happened."""

    tool_use_id: str
    content: str | list[Text] | None = None
    is_error: bool | None = None


Block = Text | Image | Thinking | RedactedThinking | ToolUse | ToolResult


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Raw = Raw()
    eager_input_streaming: Raw = Raw()


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class Format(msgspec.Struct, forbid_unknown_fields=True):
    schema: dict[str, Any]
    type: Literal["json_schema"]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None


class CountBody(msgspec.Struct, kw_only=True):
    """What a prompt consists of. None stands for the default."""

    messages: Annotated[
        list[Message], entries(1, MAX_MESSAGES), Entries(b"role", MAX_MESSAGES),
        Entries(b"type", MAX_PARTS),
    ]  # fmt: skip
    model: str | None = None
    system: str | list[Text] | None = None
    tools: Annotated[list[Tool] | None, AtMost(1024 * KIB)] = None
    tool_choice: Annotated[ToolChoice | None, AtMost(4 * KIB)] = None
    thinking: Annotated[ThinkingConfig | None, AtMost(4 * KIB)] = None
    output_config: Annotated[OutputConfig | None, AtMost(1024 * KIB)] = None


class MessagesBody(CountBody, kw_only=True):
    max_tokens: Count
    stop_sequences: Annotated[list[str] | None, AtMost(32 * KIB)] = None
    temperature: Annotated[float | None, sampling("temperature")] = None
    top_k: Annotated[int | None, sampling("top_k")] = None
    top_p: Annotated[float | None, sampling("top_p")] = None
    stream: bool | None = None
