"""OpenAI's bodies as neutral requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from octavo.engine.request import MAX_INT32, MAX_LOGPROBS, BeamSearch, check_number
from octavo.errors import InvalidValue
from octavo.generate.request import (
    GenerationRequest,
    Infill,
    Sampling,
    read_prediction,
    read_response_format,
)
from octavo.server.dialects.openai.messages import conversation, tool_choice, tools
from octavo.server.dialects.openai.schemas import (
    MAX_CHOICES,
    ChatBody,
    Common,
    CompletionBody,
    Conversation,
    ConversationBody,
    ResponseFormat,
    prompts,
)
from octavo.text.structure import Choice, Grammar, JsonSchema, Regex, Structure
from octavo.text.tools import ToolGrammar

COMPLETION_TOKENS = 16  # of a completion that names no limit

# Fields that bodies call as sampling parameters are called.
PASSED = (
    "temperature top_p top_k min_p typical_p seed presence_penalty frequency_penalty "
    "repetition_penalty logit_bias stop stop_token_ids ignore_eos min_tokens bad_words "
    "allowed_token_ids prompt_logprobs speculation"
).split()


def chat_request(body: ChatBody) -> GenerationRequest:
    """What a chat body asks for. Raises RequestError."""
    n = _choices(body)
    limit, logprobs = _chat_limits(body)
    effort, given = body.reasoning_effort, _conversation(body)
    if effort == "none":
        given["template_options"] = {"enable_thinking": False} | given["template_options"]
    return GenerationRequest(
        **given,
        required_options=required_options(None if effort == "none" else effort, body.verbosity),
        tool_choice=tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        sampling=_sampling(body, limit, logprobs),
        structure=_structure(body),
        n=n,
        thinking_budget=body.thinking_token_budget,
        prediction=read_prediction(msgspec.to_builtins(body.prediction)),
        **_common(body),
    )


def required_options(effort: str | None, verbosity: str | None) -> dict[str, Any]:
    """What a template has to read for a request to be taken; "medium" is no wish."""
    wishes = {"reasoning_effort": effort, "verbosity": verbosity}
    wishes |= {"verbosity": None} if verbosity == "medium" else {}
    return {name: value for name, value in wishes.items() if value is not None}


def completion_request(body: CompletionBody) -> GenerationRequest:
    """What a completion body asks for. Raises RequestError."""
    n = _choices(body)
    best_of = _best_of(body, n)
    given = prompts(body)
    made = 1 if _searches(body) else max(n, best_of or 0)
    if (count := len(given) * made) > MAX_CHOICES:
        raise InvalidValue(f"{count} choices in one request; {MAX_CHOICES} at most", "n")
    limit = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return GenerationRequest(
        prompts=given,
        sampling=_sampling(body, limit, body.logprobs),
        structure=_structure(body),
        n=n,
        best_of=best_of,
        echo=bool(body.echo),
        infill=Infill(body.suffix) if body.suffix else None,
        **_common(body),
    )


def conversation_request(body: ConversationBody) -> GenerationRequest:
    """The conversation of a body that only asks for its prompt. Raises RequestError."""
    return GenerationRequest(**_conversation(body))


def names(body: ChatBody | CompletionBody | ConversationBody) -> Mapping[str, str]:
    """What the fields of its request are called in a body."""
    outputs = isinstance(body, Common) and body.structured_outputs is not None
    return {
        "prompts": "prompt",
        "infill": "suffix",
        "structure": "structured_outputs" if outputs else "response_format",
        "thinking_budget": "thinking_token_budget",
        "template_options": "chat_template_kwargs",
    }


def _conversation(body: Conversation) -> dict[str, Any]:
    continued = bool(body.continue_final_message)
    return {
        "messages": conversation(body.messages),
        "tools": tools(body.tools),
        "template_options": body.chat_template_kwargs or {},
        "add_generation_prompt": (
            not continued if body.add_generation_prompt is None else body.add_generation_prompt
        ),
        "continue_final_message": continued,
    }


def _common(body: Common) -> dict[str, Any]:
    resume = None if body.resume is None else body.resume.tokens
    return {
        "priority": body.priority or 0, "timeout": body.timeout, "cache_salt": body.cache_salt,
        "resume": resume,
    }  # fmt: skip


def _sampling(body: Common, max_tokens: int | None, logprobs: int | None) -> Sampling:
    given = {name: getattr(body, name) for name in PASSED}
    if body.resume is not None and body.seed is None:
        given["seed"] = body.resume.seed
    beam = _beam_search(body)
    return Sampling(**given, max_tokens=max_tokens, logprobs=logprobs, beam=beam)


def _choices(body: Common) -> int:
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidValue(f"n is {n}; it must be between 1 and {MAX_CHOICES}", "n")
    if body.stream_options is not None and not body.stream:
        raise InvalidValue("stream_options needs stream", "stream_options")
    if body.resume is not None and not body.stream:
        raise InvalidValue("resume needs stream", "resume")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidValue("prompt_logprobs and stream exclude each other", "prompt_logprobs")
    return n


def _best_of(body: CompletionBody, n: int) -> int | None:
    """How many completions are made, of which the `n` most likely are returned."""
    best_of = body.best_of
    if best_of is None:
        return None
    if best_of > n and _searches(body):
        raise InvalidValue("best_of and beam search exclude each other", "best_of")
    if not n <= best_of <= MAX_CHOICES:
        raise InvalidValue(f"best_of is {best_of}; it must be n to {MAX_CHOICES}", "best_of")
    if best_of > n and body.stream:
        raise InvalidValue("best_of above n and stream exclude each other", "best_of")
    return best_of


def _chat_limits(body: ChatBody) -> tuple[int | None, int | None]:
    """(max_tokens, logprobs) of a chat request."""
    limits = {
        name: limit
        for name in ("max_tokens", "max_completion_tokens")
        if (limit := getattr(body, name)) is not None
    }
    if len({*limits.values()}) > 1:
        raise InvalidValue("max_tokens and max_completion_tokens differ", "max_tokens")
    for name, limit in limits.items():
        check_number(name, limit, int, 1, MAX_INT32)
    top = body.top_logprobs
    if top is not None and not body.logprobs:
        raise InvalidValue("top_logprobs needs logprobs", "top_logprobs")
    if top is not None:
        check_number("top_logprobs", top, int, 0, MAX_LOGPROBS)
    return next(iter(limits.values()), None), (top or 0) if body.logprobs else None


def _structure(body: Common) -> Structure | None:
    """What a body asks its reply to look like, in whichever way. Raises RequestError."""
    given: list[JsonSchema | Regex | Choice | Grammar | ToolGrammar] = []
    if body.response_format is not None:
        structure = read_response_format(_fields(body.response_format))
        given += [structure.what] if structure else []
    if (outputs := body.structured_outputs) is not None:
        if isinstance(outputs.json, str):
            given.append(JsonSchema(text=outputs.json, param="structured_outputs"))
        elif outputs.json is not None:
            given.append(JsonSchema(outputs.json, "structured_outputs"))
        if outputs.regex is not None:
            given.append(Regex(outputs.regex))
        if outputs.choice is not None:
            given.append(Choice(outputs.choice))
        if outputs.grammar is not None:
            given.append(Grammar(outputs.grammar))
        if outputs.json_object:
            given.append(JsonSchema({"type": "object"}, "structured_outputs"))
        if not given:
            raise InvalidValue("structured_outputs is empty", "structured_outputs")
    if len(given) > 1:
        raise InvalidValue("only one constraint can be given", "structured_outputs")
    return Structure(given[0]) if given else None


def _fields(given: ResponseFormat) -> dict[str, Any]:
    """A response format as a dict, its schema as it is."""
    named = given.json_schema
    schema = None if named is None else {} if named.schema is None else {"schema": named.schema}
    return {"type": given.type, "json_schema": schema, "schema": given.schema}


def _searches(body: Common) -> bool:
    """Whether a body asks for a beam search."""
    return bool(
        body.use_beam_search or (body.use_beam_search is None and body.beam_width is not None)
    )


def _beam_search(body: Common) -> BeamSearch | None:
    if not _searches(body):
        for name in ("beam_width", "length_penalty", "early_stopping"):
            if getattr(body, name) is not None:
                raise InvalidValue(f"{name} needs use_beam_search", name)
        return None
    n = 1 if body.n is None else body.n
    early: bool | Literal["never"] = False
    if body.early_stopping is not None:
        if body.early_stopping not in (True, False, "never"):
            raise InvalidValue('early_stopping is true, false or "never"', "early_stopping")
        early = "never" if body.early_stopping == "never" else bool(body.early_stopping)
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    width = n if body.beam_width is None else body.beam_width
    return BeamSearch(width=width, n=n, length_penalty=penalty, early_stopping=early)
