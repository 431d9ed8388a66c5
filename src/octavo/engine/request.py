"""Requests to an engine. These structs also travel between processes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from octavo.errors import RequestError
from octavo.vision.image import ImageInput

MAX_LOGPROBS = 20
MAX_BEAMS = 32
MAX_BIAS = 1024
MAX_STOP_TOKENS = 128
MAX_BANNED_SEQUENCES = 512
MIN_TIMEOUT, MAX_TIMEOUT = 1e-3, 86_400  # seconds
MAX_INT32 = (1 << 31) - 1
SPECULATION = ("auto", "off")


def shown(value: object) -> str:
    """A refused value as text for a message, which is short whatever the value."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return str(value) if isinstance(value, int | float) else f"a {type(value).__name__}"


def check_number(name: str, value: object, kind: type, low: float, high: float) -> None:
    """Raises RequestError unless `value` is of its kind and within both bounds (NaN never is)."""
    kinds = (int, float) if kind is float else (int,)
    sound = isinstance(value, kinds) and not isinstance(value, bool)
    if not (sound and low <= value <= high):  # type: ignore[operator]
        raise RequestError(
            f"{name} is {shown(value)}; it must be {'a number' if kind is float else 'an integer'} "
            f"between {low} and {high}", name, "invalid_value",
        )  # fmt: skip


def are_tokens(ids: Collection[int], vocabulary: int) -> bool:
    """True if all are integers from 0 to `vocabulary` - 1; a million take some ten milliseconds."""
    return not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocabulary)


class Thinking(msgspec.Struct, frozen=True):
    """A thinking budget: after `budget` tokens without `closing[0]`, `closing` follows.

    opening: the token that thoughts begin with where the model writes one first; None: the prompt
    has opened them. blank: tokens that may come before it, up to MAX_BLANK.
    """

    budget: int
    closing: list[int]
    opening: int | None = None
    blank: list[int] = []

    def check(self, vocabulary: int) -> None:
        """Raises RequestError naming the field at fault."""
        check_number("thinking_token_budget", self.budget, int, 0, MAX_INT32)
        opening = [] if self.opening is None else [self.opening]
        if not are_tokens([*self.closing, *opening, *self.blank], vocabulary):
            raise RequestError(
                "thoughts begin or end with an unknown token", "thinking_token_budget"
            )


class BeamSearch(msgspec.Struct, frozen=True):
    """Beam search: keeps the `width` likeliest texts and returns the `n` best.

    length_penalty: a text scores its log-probability / tokens ** length_penalty. early_stopping:
    True ends with `width` finished texts; False when no running text seems able to beat them,
    judged by its present length; "never" judges by the greatest length it could reach.
    """

    width: int
    n: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def check(self) -> None:
        """Raises RequestError naming the field at fault."""
        check_number("beam_width", self.width, int, 1, MAX_BEAMS)
        check_number("n", self.n, int, 1, self.width)
        check_number("length_penalty", self.length_penalty, float, -10, 10)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens and when to stop.

    temperature: 0 picks the most likely token. top_k 0: no limit. min_p: drops tokens less likely
    than min_p times the best. typical_p: keeps those whose surprise is nearest to the expected.
    seed: None draws one. logprobs: None for none, else how many alternatives to report (0 reports
    the chosen token's only); prompt_logprobs: the same for every prompt token after the first.
    max_tokens: None up to the context; 0 only computes the prompt. min_tokens: no end before.
    bad_words: token sequences that are never completed. allowed_token_ids: the only ones drawn.
    grammar: a Lark grammar that the text will match (see octavo.text.grammar for schemas).
    grammar_exit: where the grammar lets the text end, tokens are drawn without it, and one that it
    does not have ends the text; else they are drawn from what it allows.
    thinking: a bound on the thoughts that the prompt has opened. beam: search instead of drawing.
    speculation: "auto" verifies drafts where that saves time, "off" never; the text is the same.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: int = 0
    bad_words: list[list[int]] = []
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None
    grammar_exit: bool = False
    thinking: Thinking | None = None
    beam: BeamSearch | None = None
    speculation: str = "auto"

    @property
    def speculates(self) -> bool:
        """True if drafts may be verified."""
        return self.speculation != "off" and self.beam is None

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def check(self, vocabulary: int) -> None:
        """Raises RequestError naming the first field with an invalid value."""
        if not all(isinstance(s, str) and s for s in self.stop_strings):
            raise RequestError("a stop string is empty, or no string", "stop", "invalid_value")
        for name, (kind, low, high) in RANGES.items():
            if (value := getattr(self, name)) is not None or name not in _OPTIONAL:
                check_number(name, value, kind, low, high)
        for name in POSITIVE:
            if getattr(self, name) <= 0:
                raise RequestError(f"{name} must be above 0", name, "invalid_value")
        if self.min_tokens > (self.max_tokens or MAX_INT32):
            raise RequestError("min_tokens is above max_tokens", "min_tokens", "invalid_value")
        for name, most in (*_LENGTHS, ("allowed_token_ids", vocabulary)):
            if len(getattr(self, name) or ()) > most:
                raise RequestError(f"{name} takes {most} entries at most", name, "invalid_value")
        if self.speculation not in SPECULATION:
            raise RequestError("speculation is auto or off", "speculation", "invalid_value")
        words = [t for word in self.bad_words for t in word]
        for name, tokens in (
            ("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()), ("bad_words", words),
        ):  # fmt: skip
            if not are_tokens(tokens, vocabulary):
                raise RequestError(
                    f"{name} holds a token outside 0 to {vocabulary - 1}", name, "invalid_value"
                )
        for bias in self.logit_bias.values():
            check_number("logit_bias", bias, float, -100, 100)
        if self.allowed_token_ids == [] or not all(self.bad_words):
            name = "bad_words" if self.bad_words else "allowed_token_ids"
            raise RequestError(f"{name} has an empty entry", name, "invalid_value")
        if self.thinking is not None:
            self.thinking.check(vocabulary)
        if self.beam is not None:
            self.beam.check()
            if self.max_tokens == 0:
                raise RequestError("max_tokens is 0", "max_tokens", "invalid_value")
            neutral = SamplingParams(temperature=0)
            for name in _NOT_WITH_BEAMS:
                if getattr(self, name) != getattr(neutral, name):
                    raise RequestError(
                        f"{name} and beam search exclude each other", name, "unsupported_parameter"
                    )


_NOT_WITH_BEAMS = (
    "temperature top_p top_k min_p typical_p presence_penalty frequency_penalty repetition_penalty "
    "stop thinking"
).split()
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
RANGES: dict[str, tuple[type, float, float]] = {
    "max_tokens": (int, 0, MAX_INT32),
    "min_tokens": (int, 0, MAX_INT32),
    "typical_p": (float, 0, 1),
    "prompt_logprobs": (int, 0, MAX_LOGPROBS),
    "temperature": (float, 0, 2),
    "top_p": (float, 0, 1),
    "top_k": (int, 0, MAX_INT32),
    "min_p": (float, 0, 1),
    "seed": (int, -(1 << 63), (1 << 63) - 1),
    "presence_penalty": (float, -2, 2),
    "frequency_penalty": (float, -2, 2),
    "repetition_penalty": (float, 0.01, 10),  # by less, a logit could leave fp32
    "logprobs": (int, 0, MAX_LOGPROBS),
}
POSITIVE = ("top_p", "typical_p")  # 0 is outside


_LENGTHS = (
    ("logit_bias", MAX_BIAS),
    ("stop_token_ids", MAX_STOP_TOKENS),
    ("bad_words", MAX_BANNED_SEQUENCES),
)


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One completion to compute.

    resume, resume_prompt_logprobs: tokens that the client has already, and how many of the prompt's
    log-probabilities; the engine continues from there (a replay after a crash).
    priority: lower runs first. timeout: seconds from submission, None for no deadline.
    salt: requests share cached prefixes only with others of the same salt. pool: instead of
    generating, give the mean, first (cls) or last state of the prompt, or a cross-encoder's scores
    (cls); token_type_ids: the segment of each prompt token. adapter: the LoRA adapter to use.
    images: in the order of the prompt; image_offsets: where the placeholders of each begin in it.
    prediction: what much of the reply may be, as a source of drafts.
    tenant: for whom it is computed; tenants get equal shares of the work. ttft: seconds from
    submission in which its first token is wanted: it is computed before what is wanted later.
    progress: whether parts of the prompt are told of when they are computed.
    group: what requests that belong together, such as the prompts of one call, have in common.
    prompt_name: that its sender has given the prompt, to be told what the prefix cache holds of it.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    resume: list[int] = []
    resume_prompt_logprobs: int = 0
    priority: int = 0
    timeout: float | None = None
    salt: str = ""
    pool: Literal["", "mean", "cls", "last"] = ""
    token_type_ids: list[int] = []
    adapter: str = ""
    images: list[ImageInput] = []
    image_offsets: list[int] = []
    prediction: list[int] = []
    tenant: str = ""
    ttft: float | None = None
    progress: bool = False
    group: str = ""
    prompt_name: str = ""
