"""Request bodies of OpenAI's API. Every field is obeyed, ignored, or refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.engine.request import (
    MAX_BEAMS,
    MAX_INT32,
    MAX_LOGPROBS,
    MAX_TIMEOUT,
    MIN_TIMEOUT,
    SPECULATION,
)
from octavo.errors import InvalidValue
from octavo.generate.request import MAX_PRIORITY
from octavo.server.bounds import entries, one_of, sampling, within
from octavo.server.dialects.openai.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    AnyMessage,
    Tool,
    ToolChoice,
)
from octavo.server.parsing import Fields
from octavo.server.resume import Resume
from octavo.server.sizes import AtMost, Entries, Ids, Inputs

MAX_PROMPTS = 128
MAX_CHOICES = 128
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
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
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

    type: Annotated[str, one_of(("text", "json_object", "json_schema"))]
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
    type: Annotated[str, one_of(("text",))]
    text: str


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, one_of(("content",))]
    content: str | list[TextPart]


class Common(msgspec.Struct, kw_only=True):
    """Fields of both endpoints. None stands for the model's default."""

    model: str | None = None
    max_tokens: Annotated[Int | None, sampling("max_tokens")] = None
    temperature: Annotated[float | None, sampling("temperature")] = None
    top_p: Annotated[float | None, sampling("top_p")] = None
    top_k: Annotated[Int | None, sampling("top_k")] = None
    min_p: Annotated[float | None, sampling("min_p")] = None
    seed: Int | None = None
    stop: Annotated[str | list[str] | None, AtMost(32 * KIB)] = None
    presence_penalty: Annotated[float | None, sampling("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, sampling("frequency_penalty")] = None
    repetition_penalty: Annotated[float | None, sampling("repetition_penalty")] = None
    logit_bias: Annotated[dict[str, Any] | None, AtMost(128 * KIB)] = None
    n: Annotated[Int | None, within(1, MAX_CHOICES)] = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, AtMost(4 * KIB)] = None
    stop_token_ids: Annotated[list[Int] | None, Ids(4096)] = None
    ignore_eos: bool | None = None
    timeout: Annotated[float | None, within(MIN_TIMEOUT, MAX_TIMEOUT)] = None
    priority: Annotated[Int | None, within(-MAX_PRIORITY, MAX_PRIORITY)] = None
    typical_p: Annotated[float | None, sampling("typical_p")] = None
    min_tokens: Annotated[Int | None, sampling("min_tokens")] = None
    bad_words: Annotated[list[str] | None, AtMost(256 * KIB)] = None
    allowed_token_ids: Annotated[list[Int] | None, Ids()] = None
    prompt_logprobs: Annotated[Int | None, sampling("prompt_logprobs")] = None
    response_format: Annotated[ResponseFormat | None, AtMost(1024 * KIB)] = None
    structured_outputs: Annotated[StructuredOutputs | None, AtMost(1024 * KIB)] = None
    use_beam_search: bool | None = None
    beam_width: Annotated[Int | None, within(1, MAX_BEAMS)] = None
    length_penalty: Annotated[float | None, within(-10, 10)] = None
    early_stopping: Annotated[bool | str | None, one_of((True, False, "never"))] = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    speculation: Annotated[str | None, one_of(SPECULATION)] = None
    resume: Annotated[Resume | None, AtMost(2048 * KIB)] = None


Messages = Annotated[
    list[AnyMessage] | None,
    entries(1, MAX_MESSAGES),
    Entries(b"role", MAX_MESSAGES),
    Entries(b"type", MAX_PARTS),
]
Tools = Annotated[list[Tool] | None, AtMost(1024 * KIB)]
TemplateOptions = Annotated[dict[str, Any] | None, AtMost(64 * KIB)]


class ChatBody(Common, kw_only=True):
    messages: Annotated[Messages, Meta(extra_json_schema={"type": "array"})]
    tools: Tools = None
    chat_template_kwargs: TemplateOptions = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_tokens: Annotated[Int | None, within(1, MAX_INT32)] = None
    max_completion_tokens: Annotated[Int | None, within(1, MAX_INT32)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Int | None, within(0, MAX_LOGPROBS)] = None
    tool_choice: Annotated[str | ToolChoice | None, AtMost(4 * KIB)] = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: Annotated[Int | None, within(0, MAX_INT32)] = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    prediction: Annotated[Prediction | None, AtMost(1024 * KIB)] = None


class CompletionBody(Common, kw_only=True):
    prompt: Annotated[str | list[str | Int | list[Int]], Inputs(MAX_PROMPTS)]
    logprobs: Annotated[Int | None, sampling("logprobs")] = None
    best_of: Annotated[Int | None, within(1, MAX_CHOICES)] = None
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
