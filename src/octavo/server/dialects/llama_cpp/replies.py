"""What llama.cpp's routes answer with, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class Probability(TypedDict):
    id: int
    token: str
    bytes: list[int]
    logprob: float | None
    top_logprobs: NotRequired[list[Probability]]


class Timings(TypedDict):
    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Completion(TypedDict, total=False):
    """A completion; `response_fields` says which of these there are, and may name inner ones."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: Literal["eos", "word", "limit"]
    stopping_word: str
    tokens_cached: int
    timings: Timings
    completion_probabilities: list[Probability]


class Prompt(TypedDict):
    prompt: str


class Defaults(TypedDict):
    params: dict[str, Any]
    n_ctx: int


class Modalities(TypedDict):
    vision: bool
    audio: bool


class Properties(TypedDict):
    default_generation_settings: Defaults
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    modalities: Modalities
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool


class Slot(TypedDict):
    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool
