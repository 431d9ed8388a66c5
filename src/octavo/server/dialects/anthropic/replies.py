"""What Anthropic's routes answer with, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class Block(TypedDict):
    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    citations: NotRequired[None]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class Usage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: Literal[
        "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
    ]
    stop_sequence: str | None
    usage: Usage


class Count(TypedDict):
    input_tokens: int
