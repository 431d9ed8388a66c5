"""Request bodies of OpenAI's API. Every field is obeyed, ignored, or refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.errors import InvalidValue
from octavo.server.dialects.openai.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    Message,
    Tool,
    ToolChoice,
)
from octavo.server.parsing import Fields
from octavo.server.resume import Resume
from octavo.server.sizes import AtMost, Entries, Ids, Inputs

MAX_PROMPTS = 128
KIB = 1 << 10

FIELDS = Fields(
    ignored=frozenset(
        "user store metadata service_tier safety_identifier prompt_cache_key "
        "prompt_cache_retention".split()
    ),
    unsupported={
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "web_search_options": (),
        "moderation": (),
        "suffix": ("",),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "include_stop_str_in_output": (False,),
    },
)

Verbosity = Literal["low", "medium", "high"]
Int = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]  # what all that computes can hold


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    schema: Any = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's; `schema` goes with json_object, as llama.cpp takes it."""

    type: str
    json_schema: JsonSchema | None = None
    schema: Any = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """One way to constrain the text, as vLLM names them."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    content: str | list[TextPart]


class Common(msgspec.Struct, kw_only=True):
    """Fields of both endpoints. None stands for the model's default."""

    model: str | None = None
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    stop: Annotated[str | list[str] | None, AtMost(32 * KIB)] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, Any] | None, AtMost(128 * KIB)] = None
    n: Int | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, AtMost(4 * KIB)] = None
    stop_token_ids: Annotated[list[Int] | None, Ids(4096)] = None
    ignore_eos: bool | None = None
    timeout: float | None = None
    priority: Int | None = None
    typical_p: float | None = None
    min_tokens: Int | None = None
    bad_words: Annotated[list[str] | None, AtMost(256 * KIB)] = None
    allowed_token_ids: Annotated[list[Int] | None, Ids()] = None
    prompt_logprobs: Int | None = None
    response_format: Annotated[ResponseFormat | None, AtMost(1024 * KIB)] = None
    structured_outputs: Annotated[StructuredOutputs | None, AtMost(1024 * KIB)] = None
    use_beam_search: bool | None = None
    beam_width: Int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    speculation: str | None = None
    resume: Annotated[Resume | None, AtMost(2048 * KIB)] = None


Messages = Annotated[
    list[Message] | None, Entries(b"role", MAX_MESSAGES), Entries(b"type", MAX_PARTS)
]
Tools = Annotated[list[Tool] | None, AtMost(1024 * KIB)]
TemplateOptions = Annotated[dict[str, Any] | None, AtMost(64 * KIB)]


class ChatBody(Common, kw_only=True):
    messages: Messages
    tools: Tools = None
    chat_template_kwargs: TemplateOptions = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tool_choice: Annotated[str | ToolChoice | None, AtMost(4 * KIB)] = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: Int | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    verbosity: Verbosity | None = None
    prediction: Annotated[Prediction | None, AtMost(1024 * KIB)] = None


class CompletionBody(Common, kw_only=True):
    prompt: Annotated[str | list[str | Int | list[Int]], Inputs(MAX_PROMPTS)]
    logprobs: Int | None = None
    best_of: Int | None = None
    echo: bool | None = None
    suffix: str | None = None


class ConversationBody(msgspec.Struct, kw_only=True):
    """What a conversation becomes text of."""

    model: str | None = None
    messages: Messages = None
    tools: Tools = None
    chat_template_kwargs: TemplateOptions = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeBody(ConversationBody, kw_only=True):
    """A conversation or a text. content, add_special, parse_special, with_pieces: llama.cpp's."""

    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: Annotated[list[Int], Ids(1 << 20)]
    model: str | None = None


Conversation = ChatBody | ConversationBody


def prompts(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of a completion request, each text or token ids. Raises RequestError."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    kinds = {type(p) for p in given}
    if not given:
        raise InvalidValue("prompt is empty", "prompt")
    if len(kinds) > 1:
        raise InvalidValue("prompt mixes kinds of entries", "prompt")
    if kinds == {int}:
        return [given]  # type: ignore[list-item]
    if len(given) > MAX_PROMPTS:
        raise InvalidValue(f"{len(given)} prompts in one request; {MAX_PROMPTS} at most", "prompt")
    return given  # type: ignore[return-value]
