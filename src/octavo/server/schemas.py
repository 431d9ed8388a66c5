"""Request bodies: every field is obeyed, harmlessly accepted, or refused by name with a 400."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from octavo.errors import RequestError
from octavo.server.messages import Message, Tool

MAX_PROMPTS = 128

# Fields without effect on what is generated here: taken and ignored.
HARMLESS = frozenset(
    "user store metadata service_tier safety_identifier prompt_cache_key "
    "prompt_cache_retention".split()
)
# Features not built: only the value that asks for nothing is taken.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "suffix": ("",),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """One way to constrain the text, as vLLM names them."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Common(msgspec.Struct, kw_only=True):
    """Fields of both endpoints. None stands for the model's default."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    timeout: float | None = None
    priority: int | None = None
    typical_p: float | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None


class ChatBody(Common, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None


class CompletionBody(Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    content: str | None = None  # llama.cpp's name for prompt
    messages: list[Message] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


Body = TypeVar("Body", bound=msgspec.Struct)


def _invalid(message: str, param: str | None) -> RequestError:
    return RequestError(message, param, "invalid_value")


def parse(data: bytes, kind: type[Body]) -> Body:
    """A validated body. Raises RequestError naming the field at fault."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError):
        raise _invalid("the body is not valid JSON", None) from None
    if not isinstance(raw, dict):
        raise _invalid("the body must be a JSON object", None)
    for name in list(raw):
        if name in kind.__struct_fields__:
            continue
        value = raw.pop(name)
        if name in HARMLESS or (name in NEUTRAL and (value is None or value in NEUTRAL[name])):
            continue
        raise RequestError(f"{name[:64]} is not supported here", name[:64], "unsupported_parameter")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as e:
        path = re.search(r"at `\$\.?([^`.\[]*)", str(e))
        param = path.group(1) if path and path.group(1) else None
        missing = re.search(r"missing required field `([^`]+)`", str(e))
        raise _invalid(str(e)[:300], param or (missing.group(1) if missing else None)) from None


def prompts(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of a completion request, each text or token ids. Raises RequestError."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise _invalid("prompt is empty", "prompt")
    if all(isinstance(p, int) for p in given):
        return [[p for p in given if isinstance(p, int)]]
    if any(isinstance(p, int) for p in given) or len({type(p) for p in given}) > 1:
        raise _invalid("prompt mixes kinds of entries", "prompt")
    if len(given) > MAX_PROMPTS:
        raise _invalid(f"{len(given)} prompts in one request; {MAX_PROMPTS} at most", "prompt")
    return [p for p in given if not isinstance(p, int)]
