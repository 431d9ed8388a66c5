"""The body of /v1/responses, and its items as a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Raw

from octavo.engine.request import MAX_INT32, MAX_LOGPROBS
from octavo.errors import InvalidValue, RequestError
from octavo.generate.reply import call_arguments as reply_arguments
from octavo.generate.request import GenerationRequest, NamedTool, Sampling, read_response_format
from octavo.server.bounds import sampling, within
from octavo.server.dialects.openai.messages import MAX_MESSAGES, MAX_PARTS
from octavo.server.dialects.openai.requests import required_options
from octavo.server.dialects.openai.schemas import KIB, Effort, Int, Verbosity
from octavo.server.parsing import Fields
from octavo.server.sizes import AtMost, Entries
from octavo.text import messages as neutral
from octavo.text.messages import TextPart, call_arguments
from octavo.text.structure import Structure

LOGPROBS = "message.output_text.logprobs"
FIELDS = Fields(
    ignored=frozenset(
        "user safety_identifier prompt_cache_key prompt_cache_retention service_tier "
        "max_tool_calls".split()
    ),
    unsupported={"conversation": (), "prompt": (), "truncation": ("disabled",)},
)


class TextContent(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


class _Item(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Items of earlier replies come back with an id and a status, which have no effect."""

    id: str | None = None
    status: str | None = None


class MessageItem(_Item, tag="message"):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextContent]
    phase: str | None = None


class CallItem(_Item, tag="function_call"):
    call_id: str
    name: str
    arguments: str


class OutputItem(_Item, tag="function_call_output"):
    call_id: str
    output: str | list[TextContent]


class ReasoningItem(_Item, tag="reasoning"):
    summary: list[TextContent] = []
    content: list[TextContent] | None = None
    encrypted_content: str | None = None


Item = MessageItem | CallItem | OutputItem | ReasoningItem


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    type: Literal["function"]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    type: Literal["function"]


class Format(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: Any = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: Format | None = None
    verbosity: Verbosity | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: Raw = Raw()
    generate_summary: Raw = Raw()


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """None stands for the default. Items of `input` are read by `read_items`."""

    input: Annotated[str | list[Any], Entries(b"type", MAX_PARTS), AtMost(8192 * KIB)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[FunctionTool] | None, AtMost(1024 * KIB)] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ToolChoice | None, AtMost(4 * KIB)
    ] = None  # fmt: skip
    parallel_tool_calls: bool | None = None
    text: Annotated[TextOptions | None, AtMost(1024 * KIB)] = None
    reasoning: Annotated[Reasoning | None, AtMost(4 * KIB)] = None
    max_output_tokens: Annotated[Int | None, within(1, MAX_INT32)] = None
    temperature: Annotated[float | None, sampling("temperature")] = None
    top_p: Annotated[float | None, sampling("top_p")] = None
    top_logprobs: Annotated[Int | None, within(0, MAX_LOGPROBS)] = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, AtMost(4 * KIB)] = None
    store: bool | None = None
    background: bool | None = None
    metadata: Annotated[dict[str, str] | None, AtMost(64 * KIB)] = None


NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "structure": "text.format",
    "response_format": "text.format",
    "template_options": "reasoning.effort",
    "verbosity": "text.verbosity",
    "logprobs": "top_logprobs",
}


def names(body: ResponsesBody) -> Mapping[str, str]:
    """What the fields of its request are called in a body."""
    return NAMES


def read_items(given: str | list[Any]) -> list[Item]:
    """The items of an input. Raises InvalidValue."""
    if isinstance(given, str):
        return [MessageItem(role="user", content=given)]
    if not 1 <= len(given) <= MAX_MESSAGES:
        raise InvalidValue(
            f"input has {len(given)} entries; 1 to {MAX_MESSAGES} are taken", "input"
        )
    return [_item(f"input[{i}]", item) for i, item in enumerate(given)]


def _kept(item: Any) -> Item:
    return _item("previous_response_id", item)


def _item(at: str, given: Any) -> Item:
    if isinstance(given, dict) and "type" not in given and "role" in given:
        given = given | {"type": "message"}
    try:
        item: Item = msgspec.convert(given, Item)
        return item
    except msgspec.ValidationError as e:
        what, _, path = str(e)[:400].partition(" - at `$")
        name = at + path.rstrip("`")
        raise InvalidValue(f"{name}: {what}", name) from None


def responses_request(body: ResponsesBody, history: list[Any]) -> GenerationRequest:
    """What a body asks for after what was said before. Raises RequestError."""
    _check(body)
    messages = [neutral.message("system", body.instructions)] if body.instructions else []
    messages += conversation([_kept(item) for item in history], read_items(body.input))
    effort = body.reasoning.effort if body.reasoning else None
    options: dict[str, Any] = {}
    if effort is not None:
        options = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    choice = body.tool_choice or "auto"
    return GenerationRequest(
        messages=messages,
        tools=[
            neutral.Tool(t.name, t.description, t.parameters, strict=bool(t.strict))
            for t in body.tools or ()
        ],
        tool_choice=choice if isinstance(choice, str) else NamedTool(choice.name),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        sampling=Sampling(
            max_tokens=body.max_output_tokens, temperature=body.temperature, top_p=body.top_p,
            logprobs=_logprobs(body),
        ),
        structure=_structure(body.text),
        template_options=options,
        required_options=required_options(None, body.text.verbosity if body.text else None),
    )  # fmt: skip


def _check(body: ResponsesBody) -> None:
    if body.max_output_tokens == 0:
        raise InvalidValue("max_output_tokens is 0; it must be 1 or more", "max_output_tokens")
    if body.stream_options is not None and not body.stream:
        raise InvalidValue("stream_options needs stream", "stream_options")
    if body.background and body.stream:
        raise RequestError(
            "background and stream exclude each other here", "background", "unsupported_parameter"
        )
    if body.background and body.store is False:
        raise InvalidValue("background needs store", "background")


def _logprobs(body: ResponsesBody) -> int | None:
    top = body.top_logprobs
    if top is not None and not 0 <= top <= 20:
        raise InvalidValue(f"top_logprobs is {top}; it must be between 0 and 20", "top_logprobs")
    return (top or 0) if LOGPROBS in (body.include or ()) else None


def _structure(given: TextOptions | None) -> Structure | None:
    if given is None or given.format is None:
        return None
    form = given.format
    if form.type == "json_schema":
        named = {} if form.schema is None else {"schema": form.schema}
        return read_response_format({"type": form.type, "json_schema": named})
    return read_response_format({"type": form.type, "schema": form.schema})


def _arguments(i: int, given: str) -> dict[str, Any]:
    """The arguments of a call. Raises RequestError, but not for what was said before, whose index
    is negative: a reply may have ended within its call."""
    return reply_arguments(given) if i < 0 else call_arguments(f"input[{i}].arguments", given)


def conversation(kept: Sequence[Item], given: Sequence[Item]) -> list[neutral.Message]:
    """What was said before and an input as messages: thoughts and calls belong to the answer they
    come with."""
    out: list[neutral.Message] = []
    thoughts = ""
    for i, item in enumerate([*kept, *given], -len(kept)):
        match item:
            case ReasoningItem():
                thoughts += _text(item.content or item.summary)
            case CallItem():
                call = neutral.ToolCall(item.name, _arguments(i, item.arguments), item.call_id)
                if out and out[-1].role == "assistant" and not thoughts:
                    said = out[-1]
                    calls = (*said.tool_calls, call)
                    out[-1] = msgspec.structs.replace(said, tool_calls=calls)
                else:
                    empty = (TextPart(""),)
                    out.append(neutral.Message("assistant", empty, (call,), thoughts or None))
                    thoughts = ""
            case OutputItem():
                parts = (TextPart(_text(item.output)),)
                out.append(neutral.Message("tool", parts, tool_call_id=item.call_id))
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                reasoning = (thoughts or None) if role == "assistant" else None
                parts = (TextPart(_text(item.content)),)
                out.append(neutral.Message(role, parts, reasoning=reasoning))
                thoughts = ""
    return out


def _text(content: str | list[TextContent]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
