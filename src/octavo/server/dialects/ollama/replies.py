"""What Ollama's routes answer with, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from octavo.server.dialects.openai.replies import ScoredToken


class Function(TypedDict):
    name: str
    arguments: dict[str, Any]


class ToolCall(TypedDict):
    id: str
    function: Function


class Message(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class Made(TypedDict):
    """What both routes tell of a reply; counts only of one that has ended."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"]
    logprobs: NotRequired[list[ScoredToken]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class Chat(Made):
    message: Message


class Generated(Made):
    response: str
    thinking: NotRequired[str]


class Embeddings(TypedDict):
    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int


class Embedding(TypedDict):
    embedding: list[float]


class Details(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Shown(TypedDict):
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class Tag(TypedDict):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    modified_at: str


class Tags(TypedDict):
    models: list[Tag]


class Loaded(TypedDict):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class Running(TypedDict):
    models: list[Loaded]


class Version(TypedDict):
    version: str


class PullProgress(TypedDict):
    status: str
    digest: NotRequired[str]
    total: NotRequired[int]
    completed: NotRequired[int]
