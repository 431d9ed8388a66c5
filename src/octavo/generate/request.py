"""What is asked of a model, whichever API it came by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from octavo.engine.request import BeamSearch, SamplingParams
from octavo.errors import InvalidValue
from octavo.generate.options import check_names, typed
from octavo.text.messages import Message, Tool, message, read_messages, read_tools
from octavo.text.structure import JsonSchema, Structure
from octavo.vision.preprocess import Processed

Conversation = Sequence[Mapping[str, Any]]  # messages as dicts
MAX_PRIORITY = 1000  # and the same below 0


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters by name; what is None is as the model's defaults say.

    The fields are those of SamplingParams. bad_words are texts here. logit_bias has token ids as
    keys, which may be written as text.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, Any] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    beam: BeamSearch | None = None
    speculation: str | None = None


@dataclass(frozen=True)
class NamedTool:
    """A tool choice: this function has to be called."""

    name: str


@dataclass(frozen=True)
class Infill:
    """A gap to be filled: `suffix` is the text after it, the prompt the text before it.

    files: names and texts of other files that it may depend on.
    """

    suffix: str
    files: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """An answer to a conversation, or continuations of texts.

    messages: the conversation; else `prompts`, each text or token ids. parse_special: names of
    control tokens in `prompts` stand for these tokens, and ids may be mixed with texts. infill: the
    prompts are followed by a gap. media: of the messages, once it has been read (see
    `generate.media`). tools: the functions the model is told of; tool_choice: "none", "auto",
    "required" or a NamedTool; parallel_tool_calls: whether a reply may hold several calls.
    sampling: overrides of the model's defaults, or whole
    SamplingParams. structure: what a reply has to look like. n: choices for each prompt, the most
    likely of `best_of` if that is given. echo: each prompt comes before its continuation.
    thinking_budget: tokens of thoughts, at most. template_options: further values for the template;
    required_options: likewise, refused where the template does not read them.
    add_generation_prompt: the template opens a reply; continue_final_message: the reply continues
    the last message. to_context: max_tokens above what the context leaves mean the rest of it; else
    they are refused. priority: lower runs first. timeout: seconds. salt: of the principal who asks;
    cache_salt: the request's own. Both keep cached prefixes apart. tenant: who gets a share of the
    work. prediction: what much of the reply may be, which makes it come sooner if it is. ttft:
    seconds in which the first token is wanted. resume: tokens of the reply that an earlier server
    has given, and after which it goes on; not None for a stream that may have to go on so.

    Errors name these fields; a dialect translates the names to its own.
    """

    messages: Sequence[Message] | None = None
    media: Sequence[Processed] | None = None
    prompts: Sequence[str | list[int]] | Sequence[str | list[int | str]] = ()
    parse_special: bool = False
    infill: Infill | None = None
    tools: Sequence[Tool] = ()
    tool_choice: str | NamedTool = "auto"
    parallel_tool_calls: bool = True
    sampling: Sampling | SamplingParams = field(default_factory=Sampling)
    structure: Structure | None = None
    n: int = 1
    best_of: int | None = None
    echo: bool = False
    thinking_budget: int | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    required_options: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    to_context: bool = False
    priority: int = 0
    timeout: float | None = None
    salt: str = ""
    tenant: str = ""
    cache_salt: str | None = None
    prediction: str | None = None
    ttft: float | None = None
    resume: Sequence[int] | None = None


class ChatOptions(TypedDict, total=False):
    """What chats take beside messages and sampling parameters, as OpenAI's API calls it.

    None means the default.
    tools: functions the model may call, as dicts {"type": "function", "function": {...}};
    tool_choice: "auto", "none", "required" or a function's. response_format: {"type":
    "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}.
    thinking_token_budget: most tokens of thoughts. chat_template_kwargs: values for the template.
    adapter: the LoRA adapter to use. prediction: what much of the reply may be, as OpenAI's
    {"type": "content", "content": "..."}, which makes it come sooner if it is.
    """

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    response_format: Mapping[str, Any] | None
    thinking_token_budget: int | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    adapter: str | None
    prediction: Mapping[str, Any] | None


# What `chat_request` calls the fields of a request.
CHAT_NAMES = {
    "structure": "response_format",
    "thinking_budget": "thinking_token_budget",
    "template_options": "chat_template_kwargs",
}


def chat_request(
    conversation: str | Conversation, params: SamplingParams, options: ChatOptions, n: int = 1
) -> GenerationRequest:
    """The request of a conversation given as dicts, or as a user's text.

    Raises RequestError, and TypeError for an option that there is not.
    """
    check_names(options, ChatOptions)
    given: dict[str, Any] = {k: v for k, v in typed(options, ChatOptions).items() if v is not None}
    if isinstance(conversation, str):
        messages = [message("user", conversation)]
    else:
        messages = read_messages(conversation)
    continued = given.get("continue_final_message", False)
    return GenerationRequest(
        messages=messages,
        tools=read_tools(given.get("tools", ())),
        tool_choice=read_tool_choice(given.get("tool_choice")),
        parallel_tool_calls=given.get("parallel_tool_calls", True),
        sampling=params,
        structure=read_response_format(given.get("response_format")),
        n=n,
        thinking_budget=given.get("thinking_token_budget"),
        template_options=given.get("chat_template_kwargs", {}),
        add_generation_prompt=given.get("add_generation_prompt", not continued),
        continue_final_message=continued,
        prediction=read_prediction(given.get("prediction")),
    )


def read_prediction(given: Mapping[str, Any] | None) -> str | None:
    """The text of {"type": "content", "content": text, or parts {"type": "text", "text": …}}.

    Raises InvalidValue.
    """
    if given is None:
        return None
    content = given.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    sound = given.keys() == {"type", "content"} and given["type"] == "content"
    if not (sound and isinstance(parts, list) and all(map(_is_text, parts))):
        raise InvalidValue(
            'prediction is {"type": "content", "content": …}, a text or parts of text', "prediction"
        )
    return "".join(part["text"] for part in parts)


def _is_text(part: Any) -> bool:
    kinds = isinstance(part, Mapping) and part.keys() == {"type", "text"}
    return kinds and part["type"] == "text" and isinstance(part["text"], str)


def read_tool_choice(given: str | Mapping[str, Any] | None) -> str | NamedTool:
    """A tool choice: "auto", "none", "required", or {"type": "function", "function": {"name": …}}.

    Raises InvalidValue.
    """
    if given is None or isinstance(given, str):
        return given or "auto"
    function = given.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if given.get("type", "function") != "function" or not isinstance(name, str):
        raise InvalidValue("tool_choice names none of the tools", "tool_choice")
    return NamedTool(name)


def read_response_format(given: Mapping[str, Any] | None) -> Structure | None:
    """What a response format asks for: {"type": "text" or "json_object"}, or a schema in
    {"type": "json_schema", "json_schema": {"schema": …}}. Raises InvalidValue."""
    given = {k: v for k, v in (given or {"type": "text"}).items() if v is not None}
    match given:
        case {"type": "text", **rest} if not rest:
            return None
        case {"type": "json_object", **rest} if rest.keys() <= {"schema"}:
            return Structure(JsonSchema(rest.get("schema", {"type": "object"})))
        case {"type": "json_schema", "json_schema": {"schema": schema}, **rest} if (
            not rest and schema is not None
        ):
            return Structure(JsonSchema(schema))
    raise InvalidValue(
        "response_format is text, json_object, or json_schema with json_schema.schema",
        "response_format",
    )
