"""What OpenAI's routes answer with, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from octavo.balance.replica import ReplicaTimes


class TokenScore(TypedDict):
    token: str
    logprob: float | None
    bytes: list[int]


class ScoredToken(TokenScore):
    top_logprobs: list[TokenScore]


class ChatLogprobs(TypedDict):
    content: list[ScoredToken]
    refusal: None


class CalledFunction(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(TypedDict):
    role: str
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]
    reasoning_content: NotRequired[str]


Finish = Literal["stop", "length", "tool_calls"]


class ChatChoice(TypedDict):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    token_ids: NotRequired[list[int]]
    score: NotRequired[float]


class PromptDetails(TypedDict):
    cached_tokens: int
    image_tokens: NotRequired[int]


class CompletionDetails(TypedDict):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: NotRequired[CompletionDetails]
    beam_width: NotRequired[int]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[list[Any]]
    prompt_token_ids: NotRequired[list[int]]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[Any]]
    score: NotRequired[float]


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class InputUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: InputUsage


class DocumentText(TypedDict):
    text: str


class Ranked(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[DocumentText]


class Ranking(TypedDict):
    id: str
    model: str
    results: list[Ranked]
    usage: InputUsage


class Score(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class Scores(TypedDict):
    object: Literal["list"]
    model: str
    data: list[Score]
    usage: InputUsage


class Piece(TypedDict):
    id: int
    piece: str | list[int]


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int | Piece]


class Text(TypedDict):
    prompt: str
    content: str


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    parent: str | None
    cache_tokens: int
    times: ReplicaTimes
    state: Literal["unloaded", "loading", "ready", "unavailable"]


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class ResponseError(TypedDict):
    code: str
    message: str


class Incomplete(TypedDict):
    reason: str


class CachedTokens(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class ReasoningTokens(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class Reasoning(TypedDict):
    effort: str | None
    summary: None


class Response(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Reasoning
    service_tier: str
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: None
