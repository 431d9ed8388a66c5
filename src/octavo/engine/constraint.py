"""Grammars as masks of legal tokens, by llguidance; compiled on a thread of their own."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from octavo.engine.bitmask import Mask, words_for
from octavo.engine.canonical import Canonical
from octavo.engine.jump_forward import JumpForward
from octavo.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CACHED_GRAMMARS = 128
CACHED_CHARACTERS = 4 << 20
MAX_STATES = 50_000  # of a grammar's lexer, 1 to 2 kB each


_PLACE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")


_KEYWORDS = (
    ("Failed to generate regex for float range", "minimum, maximum: "),
    ("Anchor", "$ref: "),
    ("Resource", "$ref: "),
)


class TokenTable(msgspec.Struct, frozen=True):
    """A vocabulary as grammars need it: every token's bytes (a control token's are its name)."""

    tokens: list[bytes]
    control: list[int]
    eos: list[int]


class _Vocabulary:
    """A TokenTable in llguidance's form: it reads the attributes and calls nothing."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable, size: int) -> None:
        self.tokens = table.tokens + [b""] * (size - len(table.tokens))
        self.special_token_ids = table.control
        self.eos_token_id = table.eos[0]

    def __call__(self, text: str) -> list[int]:
        return []


def _reason(message: str) -> str:
    """An error of llguidance in one line, without the grammar that it quotes; names the keyword."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    wrong = [line for line in lines if line.startswith("error:")]  # of a regular expression
    text = wrong[0].replace("error:", "pattern:") if wrong else _PLACE.sub("", (lines or [""])[0])
    keyword = next((k for start, k in _KEYWORDS if text.startswith(start)), "")
    return (keyword + text)[:200]


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls llguidance. Raises ValueError for its panics, which are no Exceptions."""
    try:
        return function(*arguments)
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        raise ValueError("grammar: the compiler failed") from None


class Constraint:
    """A grammar at one sequence's position.

    words: length of a mask. jump_forward: finds tokens that need no step.
    """

    def __init__(
        self, matcher: LLMatcher, words: int, jump_forward: JumpForward | None = None
    ) -> None:
        self._matcher = matcher
        self._words = words
        self._jump_forward = jump_forward

    def fork(self) -> Constraint:
        """An independent copy."""
        jump_forward = self._jump_forward.fork() if self._jump_forward else None
        return Constraint(_call(self._matcher.deep_copy), self._words, jump_forward)

    @property
    def finished(self) -> bool:
        """True if no token may follow."""
        return self._matcher.is_stopped()

    @property
    def complete(self) -> bool:
        """True if the text so far matches the grammar."""
        return self._matcher.is_accepting()

    def allows(self, token: int) -> bool:
        """True if `token` may come next."""
        return self.allowed([token]) == 1

    def allowed(self, tokens: list[int]) -> int:
        """How many of `tokens` may come next, one after the other."""
        return int(_call(self._matcher.validate_tokens, tokens))

    def mask(self) -> Mask:
        """Tokens that may come next. Raises ValueError if the grammar becomes too costly."""
        mask = np.frombuffer(_call(self._matcher.compute_bitmask), np.uint32)
        self._check()
        return mask[: self._words]

    @property
    def forced_run(self) -> list[int]:
        """The tokens that are forced next."""
        return self._jump_forward.run if self._jump_forward is not None else []

    def narrow(self, mask: Mask) -> Mask:
        """Legal tokens without those that the tokenizer would not write forced text with."""
        forward = self._jump_forward
        return mask if forward is None else forward.narrow(mask, self._matcher)

    def push(self, token: int) -> None:
        """Advances by a token. Raises ValueError if it is not legal."""
        _call(self._matcher.consume_token, token)
        self._check()
        if self._jump_forward is not None:
            self._jump_forward.push(token, self._matcher)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"grammar: {_reason(self._matcher.get_error())}")


class GrammarCompiler:
    """Compiles grammars and caches those used last.

    vocabulary: tokens of the model, at least those of the table.
    """

    def __init__(self, table: TokenTable, vocabulary: int) -> None:
        self._table = table
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._canonical: Canonical | None = None
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._kept: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._compiled, self._seconds = 0, 0.0

    @property
    def counts(self) -> dict[str, int]:
        """Fields of EngineStats."""
        return {"grammars_compiled": self._compiled, "grammar_us": int(1e6 * self._seconds)}

    def start(self, grammar: str) -> Future[Any]:
        """Starts to compile a grammar; pass the result to `constraint`."""
        if grammar not in self._kept:
            self._kept[grammar] = self._thread.submit(_call, self._compile, grammar)
        self._kept.move_to_end(grammar)
        while len(self._kept) > 1 and (
            len(self._kept) > CACHED_GRAMMARS or sum(map(len, self._kept)) > CACHED_CHARACTERS
        ):
            self._kept.popitem(last=False)
        return self._kept[grammar]

    def constraint(self, compiled: Future[Any]) -> Constraint:
        """A constraint at a grammar's start; waits until it is compiled. Raises RequestError."""
        matcher = compiled.result().deep_copy()
        jump_forward = None
        if self._canonical is not None:
            jump_forward = JumpForward(self._canonical)
            jump_forward.begin(matcher)
        return Constraint(matcher, words_for(self._vocabulary), jump_forward)

    def check(self, grammar: str) -> None:
        """Compiles a grammar at once. Raises RequestError."""
        self.constraint(self.start(grammar))

    def _compile(self, grammar: str) -> LLMatcher:
        began = time.perf_counter()
        try:
            return self._compile_anew(grammar)
        finally:
            self._compiled += 1
            self._seconds += time.perf_counter() - began

    def _compile_anew(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        if self._tokenizer is None:
            table = _Vocabulary(self._table, self._vocabulary)
            self._canonical = Canonical(self._table.tokens, self._table.control)
            self._tokenizer = LLTokenizer(table, eos_token=self._table.eos)  # type: ignore[arg-type]
        limits = LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, grammar, limits=limits, log_level=0)
        trial = matcher.deep_copy()
        if not matcher.is_error():
            trial.compute_bitmask()  # fills caches that all copies share
        if trial.is_error():
            reason = _reason(trial.get_error()) or "no text matches it"
            raise RequestError(
                f"the grammar or schema cannot be used: {reason}",
                "grammar",
                "invalid_grammar",
            )
        return matcher
