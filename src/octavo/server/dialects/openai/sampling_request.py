"""From the fields of a request to what an engine is told, and to how its reply is read."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from octavo.engine.request import (
    MAX_BIAS,
    MAX_TIMEOUT,
    MIN_TIMEOUT,
    BeamSearch,
    SamplingParams,
    Thinking,
    check_number,
)
from octavo.errors import ContextExceeded, RequestError
from octavo.generate.model import ServedModel
from octavo.generate.output import ReplyFormat
from octavo.server.dialects.openai.messages import ToolUse
from octavo.server.dialects.openai.schemas import (
    ChatBody,
    Common,
    CompletionBody,
    Conversation,
    ResponseFormat,
)
from octavo.text import Tokenizer, tools
from octavo.text.structure import Choice, Grammar, JsonSchema, Regex, Structure, Thoughts
from octavo.text.tools import THINK, THOUGHT, ToolFormat

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_BAD_WORDS = 128

# What chat templates are given by the server itself.
RESERVED = frozenset(
    "messages tools add_generation_prompt continue_final_message tokenize chat_template "
    "bos_token eos_token".split()
)
PASSED = (
    "temperature top_p top_k min_p typical_p presence_penalty frequency_penalty "
    "repetition_penalty stop_token_ids ignore_eos min_tokens allowed_token_ids prompt_logprobs"
).split()


def _invalid(message: str, param: str) -> RequestError:
    return RequestError(message, param, "invalid_value")


def _stops(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS or any(not 1 <= len(s) <= MAX_STOP_LENGTH for s in stops):
        raise _invalid(
            f"stop takes up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters", "stop"
        )
    return stops


def _biases(biases: dict[str, Any] | None, vocabulary: int) -> dict[int, float]:
    given = biases or {}
    if len(given) > MAX_BIAS:
        raise _invalid(f"logit_bias has {len(given):,} entries; {MAX_BIAS:,} at most", "logit_bias")
    out = {}
    for key, bias in given.items():
        at = f"logit_bias[{key[:32]!r}]"
        number = key.isascii() and key.isdigit() and len(key) < 16
        if not number or not 0 <= int(key) < vocabulary:
            raise _invalid(f"{at}: keys are token ids, 0 to {vocabulary - 1}", "logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise _invalid(f"{at} must be a number between -100 and 100", "logit_bias")
        out[int(key)] = float(bias)
    return out


def _bad_words(words: list[str] | None, tokenizer: Tokenizer) -> list[list[int]]:
    """Each word as it is tokenized at the beginning of a text and after a space."""
    given = words or []
    if len(given) > MAX_BAD_WORDS or any(not 1 <= len(w) <= MAX_STOP_LENGTH for w in given):
        raise _invalid(
            f"bad_words takes up to {MAX_BAD_WORDS} texts of 1 to {MAX_STOP_LENGTH} characters",
            "bad_words",
        )
    out = []
    for word in given:
        forms = [tokenizer.encode(w, add_bos=False) for w in (word, " " + word.lstrip())]
        out += [ids for ids in forms if ids and ids not in out]
    return out


def choices(body: Common) -> int:
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_CHOICES:
        raise _invalid(f"n is {n}; it must be between 1 and {MAX_CHOICES}", "n")
    if body.stream_options is not None and not body.stream:
        raise _invalid("stream_options needs stream", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise _invalid("prompt_logprobs and stream exclude each other", "prompt_logprobs")
    return n


def candidates(body: CompletionBody, n: int) -> int:
    """How many completions are made, of which the `n` most likely are returned."""
    best_of = n if body.best_of is None else body.best_of
    if best_of > n and (body.use_beam_search or body.beam_width):
        raise _invalid("best_of and beam search exclude each other", "best_of")
    if not n <= best_of <= MAX_CHOICES:
        raise _invalid(f"best_of is {best_of}; it must be n to {MAX_CHOICES}", "best_of")
    if best_of > n and body.stream:
        raise _invalid("best_of above n and stream exclude each other", "best_of")
    return best_of


def structure(body: Common) -> Structure | None:
    """What a body asks its reply to look like, in whichever way. Raises RequestError."""
    given: list[JsonSchema | Regex | Choice | Grammar] = []
    if body.response_format is not None and (format := _response_format(body.response_format)):
        given.append(format)
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
            raise _invalid("structured_outputs is empty", "structured_outputs")
    if len(given) > 1:
        raise _invalid("only one constraint can be given", "structured_outputs")
    return Structure(given[0]) if given else None


def _response_format(given: ResponseFormat) -> JsonSchema | None:
    wanted = None if given.json_schema is None else given.json_schema.schema
    if given.type == "text" and given.json_schema is None and given.schema is None:
        return None
    if given.type == "json_object" and given.json_schema is None:
        return JsonSchema({"type": "object"} if given.schema is None else given.schema)
    if given.type == "json_schema" and wanted is not None and given.schema is None:
        return JsonSchema(wanted)
    raise _invalid(
        "response_format is text, json_object, or json_schema with json_schema.schema",
        "response_format",
    )


def beam_search(body: Common) -> BeamSearch | None:
    """The beam search a body asks for. Raises RequestError."""
    wanted = body.use_beam_search or (body.use_beam_search is None and body.beam_width is not None)
    for name in () if wanted else ("beam_width", "length_penalty", "early_stopping"):
        if getattr(body, name) is not None:
            raise _invalid(f"{name} needs use_beam_search", name)
    if not wanted:
        return None
    n = 1 if body.n is None else body.n
    early: bool | Literal["never"] = False
    if body.early_stopping is not None:
        if body.early_stopping not in (True, False, "never"):
            raise _invalid('early_stopping is true, false or "never"', "early_stopping")
        early = "never" if body.early_stopping == "never" else bool(body.early_stopping)
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    width = n if body.beam_width is None else body.beam_width
    return BeamSearch(width=width, n=n, length_penalty=penalty, early_stopping=early)


def sampling(
    body: Common, served: ServedModel, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Parameters of a request: its own, else the model's defaults. A missing seed is drawn here."""
    defaults = served.defaults
    given = {name: value for name in PASSED if (value := getattr(body, name)) is not None}
    if beam := beam_search(body):
        defaults = SamplingParams(temperature=0, beam=beam)
    return msgspec.structs.replace(
        defaults,
        **given,
        max_tokens=max_tokens,
        seed=secrets.randbits(62) if body.seed is None else body.seed,
        stop=_stops(body.stop),
        logit_bias=_biases(body.logit_bias, served.vocabulary),
        bad_words=_bad_words(body.bad_words, served.tokenizer),
        logprobs=logprobs,
    )


def check_numbers(body: Common) -> None:
    """What must hold whatever the prompt is. Raises RequestError."""
    check_number("priority", body.priority or 0, int, -1000, 1000)
    if body.timeout is not None:
        check_number("timeout", body.timeout, float, MIN_TIMEOUT, MAX_TIMEOUT)


def check_texts(texts: Iterable[str], served: ServedModel, param: str) -> None:
    """What is too long whatever it says is not tokenized. Raises RequestError."""
    for text in texts:
        if (least := served.tokenizer.least_tokens(text)) > served.context:
            raise ContextExceeded(served.context, least, 0, param)


def check_length(
    prompts: list[list[int]], max_tokens: int | None, served: ServedModel, param: str
) -> None:
    """Lengths before contents: what fits the context, and ids that exist. Raises RequestError."""
    wanted = 1 if max_tokens is None else max_tokens
    longest = max(map(len, prompts))
    if longest + wanted > served.context:
        raise ContextExceeded(served.context, longest, wanted, param)
    for ids in prompts:
        if not ids:
            raise _invalid("the prompt is empty", param)
        if min(ids) < 0 or max(ids) >= served.vocabulary:
            raise _invalid(f"a prompt token is outside 0 to {served.vocabulary - 1}", param)


def salted(key: str, salt: str | None) -> str:
    """What keeps cached prefixes apart: an API key's salt, joined with a request's own."""
    return hashlib.sha256(f"{key}/{salt}".encode()).hexdigest()[:32] if salt else key


def chat_limits(body: ChatBody) -> tuple[int | None, int | None]:
    """(max_tokens, logprobs) of a chat request."""
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise _invalid("max_tokens and max_completion_tokens differ", "max_tokens")
    if 0 in limits:
        raise _invalid("max_tokens is 0; it must be 1 or more", "max_tokens")
    top = body.top_logprobs
    if top is not None and not body.logprobs:
        raise _invalid("top_logprobs needs logprobs", "top_logprobs")
    if top is not None and not 0 <= top <= 20:
        raise _invalid(f"top_logprobs is {top}; it must be between 0 and 20", "top_logprobs")
    return next(iter(limits), None), (top or 0) if body.logprobs else None


def ending(body: Conversation) -> tuple[bool, bool]:
    """Whether the prompt opens a reply, and whether it stops within its last message."""
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        raise _invalid(
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
        )
    return not continued and body.add_generation_prompt is not False, continued


def template_options(body: Conversation) -> dict[str, Any]:
    """chat_template_kwargs, checked: plain values under names that the server does not use."""
    given = body.chat_template_kwargs or {}
    for name, value in given.items():
        plain = value is None or isinstance(value, bool | int | float | str)
        plain = plain and len(str(value)) <= MAX_STOP_LENGTH
        if name in RESERVED or name.startswith("_") or not name.isidentifier() or not plain:
            raise _invalid(
                f"chat_template_kwargs.{name[:32]} cannot be given", "chat_template_kwargs"
            )
    return given


def chat_structure(
    body: ChatBody, use: ToolUse | None, style: ToolFormat, tokenizer: Tokenizer,
    reasons: bool, thinking: bool,
) -> Structure | None:  # fmt: skip
    """What a chat reply has to look like, with what tools and thoughts ask for."""
    made = structure(body)
    if use is not None and use.callable and (use.required or use.strict):
        if made is not None:
            raise _invalid(
                "tools that are enforced and response_format exclude each other", "tools"
            )
        made = Structure(
            tools.tool_grammar(
                use.callable, style, tokenizer, required=use.required, parallel=use.parallel
            )
        )
    if made is not None and reasons:
        opening, closing = (tools.terminal(m, tokenizer) for m in (THINK, THOUGHT))
        return Structure(made.what, Thoughts(opening, closing, inside=thinking))
    return made


def for_chat(
    params: SamplingParams, use: ToolUse | None, style: ToolFormat, tokenizer: Tokenizer,
    reasons: bool, thinking: bool, budget: int | None,
) -> tuple[SamplingParams, ReplyFormat]:  # fmt: skip
    """Adds what thoughts ask for to parameters, and says how to read the reply."""
    if budget is not None:
        end = tokenizer.vocabulary.get(THOUGHT)
        if not reasons or end is None:
            raise _invalid("this model does not think", "thinking_token_budget")
        if budget < 0:
            raise _invalid("thinking_token_budget is below 0", "thinking_token_budget")
        if thinking:
            after = tokenizer.encode("\n\n", add_bos=False)
            params = msgspec.structs.replace(params, thinking=Thinking(budget, [end, *after]))
    callable_tools = style if use is not None and use.callable else None
    return params, ReplyFormat(callable_tools, reasons, thinking)
