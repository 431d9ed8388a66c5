"""Anthropic's bodies as neutral requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import InvalidValue
from octavo.generate.request import GenerationRequest, NamedTool, Sampling
from octavo.server.dialects.anthropic.schemas import (
    MAX_MESSAGES,
    Block,
    CountBody,
    Image,
    Message,
    MessagesBody,
    RedactedThinking,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
)
from octavo.text import messages as neutral
from octavo.text.messages import ImagePart, Part, TextPart
from octavo.text.structure import JsonSchema, Structure

NAMES = {
    "stop": "stop_sequences",
    "structure": "output_config.format",
    "thinking_budget": "thinking.budget_tokens",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def names(body: CountBody) -> Mapping[str, str]:
    """What the fields of its request are called in a body."""
    return NAMES


def messages_request(body: MessagesBody) -> GenerationRequest:
    """What a body asks for. Raises RequestError."""
    thinking, budget = body.thinking, None
    if thinking is not None and thinking.type == "enabled":
        budget = thinking.budget_tokens
        if budget is None or budget >= body.max_tokens:
            name = "thinking.budget_tokens"
            raise InvalidValue(f"{name} is a number below max_tokens, {body.max_tokens}", name)
    sampling = Sampling(
        max_tokens=body.max_tokens, temperature=body.temperature, top_k=body.top_k,
        top_p=body.top_p, stop=body.stop_sequences,
    )  # fmt: skip
    return GenerationRequest(
        **_prompt(body), sampling=sampling, structure=_structure(body), thinking_budget=budget,
        to_context=True,
    )  # fmt: skip


def count_request(body: CountBody) -> GenerationRequest:
    """The prompt of a body that is only counted. Raises RequestError."""
    return GenerationRequest(**_prompt(body))


def _prompt(body: CountBody) -> dict[str, Any]:
    said = body.messages
    if not 1 <= len(said) <= MAX_MESSAGES:
        raise InvalidValue(
            f"messages has {len(said)} entries; 1 to {MAX_MESSAGES} are taken", "messages"
        )
    messages = [neutral.Message("system", _parts(body.system))] if body.system else []
    for i, each in enumerate(said):
        messages += _turn(f"messages[{i}]", each)
    continued = said[-1].role == "assistant"
    choice = body.tool_choice
    return {
        "messages": messages,
        "tools": [
            neutral.Tool(t.name, t.description, t.input_schema, strict=bool(t.strict))
            for t in body.tools or ()
        ],
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
        "template_options": _template_options(body),
        "continue_final_message": continued,
        "add_generation_prompt": not continued,
    }


def _template_options(body: CountBody) -> dict[str, Any]:
    """What templates are told of thoughts, which there are only where they are asked for."""
    thinking, config = body.thinking, body.output_config
    options: dict[str, Any] = {
        "enable_thinking": thinking is not None and thinking.type != "disabled"
    }
    if config is not None and config.effort is not None:
        options["reasoning_effort"] = config.effort
    return options


def _tool_choice(body: CountBody) -> str | NamedTool:
    choice = body.tool_choice
    if choice is None:
        return "auto"
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidValue("tool_choice.name goes with the type tool", "tool_choice.name")
    return CHOICES[choice.type] if choice.name is None else NamedTool(choice.name)


def _structure(body: MessagesBody) -> Structure | None:
    config = body.output_config
    if config is None or config.format is None:
        return None
    return Structure(JsonSchema(config.format.schema, NAMES["structure"]))


def _parts(content: str | Sequence[Text] | None) -> tuple[TextPart, ...]:
    texts = [content] if isinstance(content, str) else [block.text for block in content or ()]
    return tuple(map(TextPart, texts))


def _turn(at: str, said: Message) -> list[neutral.Message]:
    """A message as templates take it: results of tools are messages of their own."""
    if isinstance(said.content, str):
        return [neutral.message(said.role, said.content)]
    if said.role == "assistant":
        return [_answer(at, said.content)]
    out: list[neutral.Message] = []
    parts: list[Part] = []
    for i, block in enumerate(said.content):
        if isinstance(block, Text):
            parts.append(TextPart(block.text))
        elif isinstance(block, Image) and said.role == "user":
            parts.append(ImagePart(block.source.location, f"{at}.content[{i}].source"))
        elif isinstance(block, ToolResult) and said.role == "user":
            if parts:
                out.append(neutral.Message("user", tuple(parts)))
                parts = []
            content = _parts(block.content)
            out.append(neutral.Message("tool", content, tool_call_id=block.tool_use_id))
        else:
            raise _misplaced(at, i, said.role)
    if parts or not out:
        out.append(neutral.Message(said.role, tuple(parts)))
    return out


def _answer(at: str, content: Sequence[Block]) -> neutral.Message:
    """What the assistant said before."""
    parts: list[TextPart] = []
    calls: list[neutral.ToolCall] = []
    thoughts = ""
    for i, block in enumerate(content):
        match block:
            case Text():
                parts.append(TextPart(block.text))
            case Thinking():
                thoughts += block.thinking
            case ToolUse():
                calls.append(neutral.ToolCall(block.name, block.input, block.id))
            case RedactedThinking():
                pass  # it was never ours to read
            case _:
                raise _misplaced(at, i, "assistant")
    return neutral.Message("assistant", tuple(parts), tuple(calls), thoughts or None)


def _misplaced(at: str, i: int, role: str) -> InvalidValue:
    name = f"{at}.content[{i}].type"
    return InvalidValue(f"{name}: a message of role {role} has no such block", name)
