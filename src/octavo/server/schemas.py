"""Request bodies: every field is obeyed, harmlessly accepted, or refused by name with a 400."""

from __future__ import annotations

import re
import secrets
from typing import Any, TypeVar

import msgspec

from octavo.engine.request import SamplingParams
from octavo.errors import RequestError

MAX_MESSAGES = 4096
MAX_PROMPTS = 128
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TIMEOUT = 86_400
MAX_STOP_LENGTH = 256
ROLES = ("system", "developer", "user", "assistant")

# Fields without effect on what is generated here: taken and ignored.
HARMLESS = frozenset(
    "user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "parallel_tool_calls".split()
)
# Features not built: only the value that asks for nothing is taken.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "suffix": ("",),
    "echo": (False,),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None


class Common(msgspec.Struct, kw_only=True):
    """Fields of both endpoints. None stands for the model's default."""

    model: str
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


class ChatBody(Common, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionBody(Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None


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


def _stops(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS or any(not 1 <= len(s) <= MAX_STOP_LENGTH for s in stops):
        raise _invalid(
            f"stop takes up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters", "stop"
        )
    return stops


def _biases(biases: dict[str, float] | None) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in (biases or {}).items()}
    except ValueError:
        raise _invalid("logit_bias maps token ids to numbers", "logit_bias") from None


def choices(body: Common) -> int:
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_CHOICES:
        raise _invalid(f"n is {n}; it must be between 1 and {MAX_CHOICES}", "n")
    if body.stream_options is not None and not body.stream:
        raise _invalid("stream_options needs stream", "stream_options")
    return n


def sampling(
    body: Common, defaults: SamplingParams, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Parameters of a request: its own, else the model's defaults. A missing seed is drawn here."""
    given = {
        name: value
        for name in (
            "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty "
            "stop_token_ids ignore_eos"
        ).split()
        if (value := getattr(body, name)) is not None
    }
    return msgspec.structs.replace(
        defaults,
        **given,
        max_tokens=max_tokens,
        seed=secrets.randbits(62) if body.seed is None else body.seed,
        stop=_stops(body.stop),
        logit_bias=_biases(body.logit_bias),
        logprobs=logprobs,
    )


def check_numbers(body: Common, prompts: list[list[int]], vocabulary: int) -> None:
    """What must hold before a request can be sent to an engine. Raises RequestError."""
    if not -1000 <= (body.priority or 0) <= 1000:
        raise _invalid("priority must be between -1000 and 1000", "priority")
    if body.timeout is not None and not 0 < body.timeout <= MAX_TIMEOUT:
        raise _invalid(f"timeout must be above 0 and at most {MAX_TIMEOUT} seconds", "timeout")
    if any(not 0 <= token < vocabulary for prompt in prompts for token in prompt):
        raise _invalid(f"a prompt token is outside 0 to {vocabulary - 1}", "prompt")


def chat_limits(body: ChatBody) -> tuple[int | None, int | None]:
    """(max_tokens, logprobs) of a chat request."""
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise _invalid("max_tokens and max_completion_tokens differ", "max_tokens")
    top = body.top_logprobs
    if top is not None and not body.logprobs:
        raise _invalid("top_logprobs needs logprobs", "top_logprobs")
    if top is not None and not 0 <= top <= 20:
        raise _invalid(f"top_logprobs is {top}; it must be between 0 and 20", "top_logprobs")
    return next(iter(limits), None), (top or 0) if body.logprobs else None


def messages(body: ChatBody | TokenizeBody) -> list[dict[str, Any]]:
    """Messages for the template: roles checked, text parts joined. Raises RequestError."""
    given = body.messages or []
    if not 1 <= len(given) <= MAX_MESSAGES:
        raise _invalid(
            f"messages has {len(given)} entries; 1 to {MAX_MESSAGES} are taken", "messages"
        )
    out = []
    for i, m in enumerate(given):
        if m.role not in ROLES:
            raise _invalid(
                f"messages[{i}].role is {m.role[:32]!r}; it may be {', '.join(ROLES)}", "messages"
            )
        if m.tool_calls:
            raise RequestError("tool calls are not supported", "messages", "unsupported_parameter")
        out.append(
            {"role": "system" if m.role == "developer" else m.role, "content": _content(i, m)}
        )
    return out


def _content(i: int, message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return message.refusal or ""
        raise _invalid(f"messages[{i}].content is missing", "messages")
    texts = []
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise RequestError(
                f"messages[{i}] holds a {part.type[:32]!r} part; this model takes text only",
                "messages",
                "unsupported_parameter",
            )
        texts.append(part.text)
    return "".join(texts)


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
