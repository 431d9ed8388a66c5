"""Request bodies: every field is obeyed, harmlessly accepted, or refused by name with a 400."""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta, Raw

from octavo.errors import InvalidValue, RequestError
from octavo.server.dialects.openai.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    Message,
    Tool,
    ToolChoice,
)
from octavo.server.sizes import SMALL, AtMost, Entries, Ids, Inputs, Model

MAX_PROMPTS = 128
KIB = 1 << 10

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
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}

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


class CompletionBody(Common, kw_only=True):
    prompt: Annotated[str | list[str | Int | list[Int]], Inputs(MAX_PROMPTS)]
    logprobs: Int | None = None
    best_of: Int | None = None
    echo: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    messages: Messages = None
    tools: Tools = None
    chat_template_kwargs: TemplateOptions = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    model: str | None = None
    prompt: str | None = None
    content: str | None = None  # llama.cpp's name for prompt
    add_special_tokens: bool = True


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: Annotated[list[Int], Ids(1 << 20)]
    model: str | None = None


Conversation = ChatBody | TokenizeBody
Body = TypeVar("Body", bound=msgspec.Struct)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_INVALID = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?$", re.DOTALL)


def _unsupported(name: str) -> RequestError:
    return RequestError(f"{name} is not supported here", name, "unsupported_parameter")


def _refusal(error: msgspec.ValidationError) -> RequestError:
    """What msgspec found, under the whole path of the field at fault."""
    text = str(error)[:400]
    if found := _UNKNOWN.match(text):
        name, path = found.groups()
        return _unsupported(f"{path[:200]}.{name[:64]}" if path else name[:64])
    if found := _MISSING.match(text):
        name, path = found.groups()
        path = f"{path[:200]}.{name}" if path else name
        return InvalidValue(f"{path} is missing", path)
    found = _INVALID.match(text)
    what, path = found.groups() if found else (text, None)
    return InvalidValue(f"{path}: {what}" if path else what, path)


@cache
def _outline(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A struct of the texts of a body's fields, and of those that every body may have."""
    names = {*kind.__struct_fields__, *HARMLESS, *NEUTRAL}
    fields = [(name, Raw, Raw()) for name in sorted(names)]
    return msgspec.defstruct(kind.__name__, fields, forbid_unknown_fields=True)


@cache
def _rules(kind: type[msgspec.Struct]) -> dict[str, list[Any]]:
    """What bounds the size of each field."""
    hints = get_type_hints(kind, include_extras=True)
    rules = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: [r for r in found if hasattr(r, "check")] for name, found in rules.items()}


def _look(data: bytes, kind: type[msgspec.Struct], model: Model) -> None:
    """Refuses names that are unknown and fields that are too large, before contents are decoded."""
    outline = msgspec.json.decode(data, type=_outline(kind))
    for name, accepted in NEUTRAL.items():
        text = b"" if name in kind.__struct_fields__ else bytes(getattr(outline, name))
        if text not in (b"", b"null") and not _is_one_of(text, accepted):
            raise _unsupported(name)
    if len(data) > SMALL:
        for name, rules in _rules(kind).items():
            for rule in rules:
                rule.check(bytes(getattr(outline, name)), name, model)


def _is_one_of(text: bytes, values: tuple[Any, ...]) -> bool:
    try:
        return len(text) <= 64 and msgspec.json.decode(text) in values
    except msgspec.ValidationError:  # a number beyond all
        return False


def parse(data: bytes, kind: type[Body], model: Model) -> Body:
    """A validated body. Raises RequestError naming the field at fault, by its whole path."""
    try:
        _look(data, kind, model)
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as e:
        if not data.lstrip().startswith(b"{"):
            raise InvalidValue("the body must be a JSON object", None) from None
        raise _refusal(e) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidValue("the body is not valid JSON in UTF-8", None) from None
    except RecursionError:
        raise InvalidValue("the body nests too deeply", None) from None


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
