"""Ollama's bodies as neutral requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import InvalidValue
from octavo.generate.request import GenerationRequest, Infill, Sampling
from octavo.server.dialects.ollama.schemas import (
    MAX_INPUTS,
    ChatBody,
    Common,
    EmbedBody,
    GenerateBody,
    Message,
    Options,
)
from octavo.server.dialects.openai.messages import MAX_MESSAGES, tools
from octavo.text import messages as neutral
from octavo.text.structure import JsonSchema, Structure

# Options by the names of sampling parameters.
SAMPLING = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "typical_p": "typical_p", "seed": "seed", "stop": "stop",
    "repetition_penalty": "repeat_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}  # fmt: skip
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
NAMES = {
    **{name: f"options.{option}" for name, option in SAMPLING.items()},
    "max_tokens": "options.num_predict", "structure": "format", "prompts": "prompt",
    "infill": "suffix", "template_options": "think", "logprobs": "top_logprobs",
}  # fmt: skip


def plain_name(name: str | None) -> str | None:
    """A model's name without the tag that Ollama's clients may add."""
    return None if name is None else name.removesuffix(":latest")


def names(body: Common) -> Mapping[str, str]:
    """What the fields of its request are called in a body."""
    prompted = isinstance(body, GenerateBody)
    return NAMES | ({"messages": "prompt"} if prompted else {})


def chat_request(body: ChatBody) -> GenerationRequest:
    """What a chat body asks for. Raises RequestError."""
    said = body.messages or []
    if len(said) > MAX_MESSAGES:
        raise InvalidValue(
            f"messages has {len(said)} entries; {MAX_MESSAGES} at most are taken", "messages"
        )
    continued = bool(said) and said[-1].role == "assistant" and not said[-1].tool_calls
    return GenerationRequest(
        messages=[_message(f"messages[{i}]", m) for i, m in enumerate(said)],
        tools=tools(body.tools),
        continue_final_message=continued,
        add_generation_prompt=not continued,
        **_common(body),
    )


def generate_request(body: GenerateBody) -> GenerationRequest:
    """What a prompt asks for: a user's message, raw text, or text before a gap.

    Raises RequestError.
    """
    prompt = body.prompt or ""
    if body.suffix:
        for name in ("system", "raw"):
            if getattr(body, name):
                raise InvalidValue(f"{name} and suffix exclude each other", name)
        return GenerationRequest(prompts=[prompt], infill=Infill(body.suffix), **_common(body))
    if body.raw:
        if body.system:
            raise InvalidValue("system and raw exclude each other", "system")
        return GenerationRequest(prompts=[prompt], **_common(body))
    messages = [neutral.message("system", body.system)] if body.system else []
    return GenerationRequest(messages=[*messages, neutral.message("user", prompt)], **_common(body))


def embed_inputs(body: EmbedBody) -> list[str]:
    """The texts to embed; none of a body that only has the model loaded. Raises InvalidValue."""
    if not body.input:
        return []
    given = [body.input] if isinstance(body.input, str) else body.input
    if len(given) > MAX_INPUTS or not all(given):
        raise InvalidValue(f"input takes up to {MAX_INPUTS} texts, none empty", "input")
    return given


def _common(body: Common) -> dict[str, Any]:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidValue("top_logprobs needs logprobs", "top_logprobs")
    return {
        "sampling": _sampling(body.options or Options(), _logprobs(body)),
        "structure": _structure(body),
        "template_options": _template_options(body),
        "to_context": True,
    }


def _logprobs(body: Common) -> int | None:
    top = body.top_logprobs or 0
    if not 0 <= top <= 20:
        raise InvalidValue(f"top_logprobs is {top}; it must be between 0 and 20", "top_logprobs")
    return top if body.logprobs else None


def _sampling(options: Options, logprobs: int | None) -> Sampling:
    given = {name: getattr(options, option) for name, option in SAMPLING.items()}
    if options.repeat_last_n == 0:  # no token is looked back at
        given |= PENALTIES
    if options.seed == -1:
        given["seed"] = None
    limit = options.num_predict  # 0 and below: until the context is full
    limit = limit if limit is not None and limit > 0 else None
    return Sampling(max_tokens=limit, logprobs=logprobs, **given)


def _structure(body: Common) -> Structure | None:
    if not body.format and body.format != {}:
        return None
    schema = {"type": "object"} if body.format == "json" else body.format
    return Structure(JsonSchema(schema, "format"))


def _template_options(body: Common) -> dict[str, Any]:
    if body.think is None:
        return {}
    options: dict[str, Any] = {"enable_thinking": body.think is not False}
    return options | ({"reasoning_effort": body.think} if isinstance(body.think, str) else {})


def _message(at: str, m: Message) -> neutral.Message:
    pictures = [
        neutral.ImagePart(f"data:image/png;base64,{data}", f"{at}.images[{i}]")  # of any format
        for i, data in enumerate(m.images or ())
    ]
    if pictures and m.role != "user":
        raise InvalidValue(f"{at}.images: only users show pictures", f"{at}.images")
    if m.role != "assistant" and m.tool_calls:
        raise InvalidValue(f"{at}.tool_calls: only the assistant calls tools", f"{at}.tool_calls")
    calls = [
        neutral.ToolCall(c.function.name, c.function.arguments, c.id or None)
        for c in m.tool_calls or ()
    ]
    assistant, tool = m.role == "assistant", m.role == "tool"
    return neutral.Message(
        m.role, (neutral.TextPart(m.content or ""), *pictures), tuple(calls),
        reasoning=(m.thinking or None) if assistant else None,
        tool_call_id=m.tool_call_id if tool else None,
        name=m.tool_name if tool else None,
    )  # fmt: skip
