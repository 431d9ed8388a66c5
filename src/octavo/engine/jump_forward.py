"""Jump-forward decoding: the tokens that a grammar forces next, as the tokenizer writes them."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from octavo.engine import bitmask
from octavo.engine.bitmask import Mask
from octavo.engine.canonical import Canonical

if TYPE_CHECKING:
    from llguidance import LLMatcher

TAIL = 64  # bytes before a forced text that its tokenization may depend on
MAX_BYTES = 1024  # of forced text tokenized at once
MAX_NARROWED = 128  # legal tokens of a mask that is searched for tokens that split forced text
SPECIAL = b"\xff["  # begins a control token in what llguidance forces: \xff[ID]


class JumpForward:
    """The run of tokens that a grammar forces next, which depends on the tokens before it alone.

    A run ends before a token that a longer one, which reaches into text that is not forced, could
    replace: that choice is the model's.
    """

    def __init__(self, canonical: Canonical) -> None:
        self._canonical = canonical
        self._tail = b""  # the last bytes of the text
        self._run: list[int] = []  # last first

    @property
    def run(self) -> list[int]:
        """The tokens that are forced next, in order."""
        return self._run[::-1]

    def fork(self) -> JumpForward:
        """An independent copy."""
        copy = JumpForward(self._canonical)
        copy._tail, copy._run = self._tail, list(self._run)
        return copy

    def push(self, token: int, matcher: LLMatcher) -> None:
        """Advances by a token that `matcher` has just consumed."""
        special = token in self._canonical.control
        self._tail = b"" if special else (self._tail + self._canonical.tokens[token])[-TAIL:]
        followed = bool(self._run) and self._run.pop() == token
        if not followed or not self._run:
            self.begin(matcher)

    def begin(self, matcher: LLMatcher) -> None:
        """Finds the run of forced tokens at the position of `matcher`."""
        self._run = []
        forced = matcher.deep_copy().compute_ff_bytes()  # which moves it past control tokens
        if not forced:
            return
        text, special, rest = forced.partition(SPECIAL)
        if not text:
            self._run = [int(rest[: rest.index(b"]")])]
            return
        cut = len(text) > MAX_BYTES  # there is more: what is near the end depends on it
        text = text[:MAX_BYTES].decode("utf-8", "ignore").encode()  # whole characters
        run = self._canonical.continuation(self._tail, text)
        run = run[: matcher.validate_tokens(run)]
        if cut:
            run = self._before(run, len(text) - TAIL)
        elif not special:
            run = run[: self._fixed(run, matcher.deep_copy())]
        self._run = run[::-1]

    def _before(self, run: list[int], end: int) -> list[int]:
        """The tokens of a run that end at byte `end` or before."""
        ends = accumulate(len(self._canonical.tokens[t]) for t in run)
        return [t for t, at in zip(run, ends, strict=True) if at <= end]

    def _fixed(self, run: list[int], probe: LLMatcher) -> int:
        """Number of tokens of a run that no longer token could replace."""
        rest = b"".join(self._canonical.tokens[i] for i in run)
        for done, token in enumerate(run):
            longer = self._canonical.longer(rest)
            if len(longer) and _any_legal(longer, probe):
                return done
            probe.consume_token(token)
            rest = rest[len(self._canonical.tokens[token]) :]
        return len(run)

    def narrow(self, mask: Mask, matcher: LLMatcher) -> Mask:
        """Removes legal tokens that would split forced text in a way the tokenizer does not, unless
        no others are left. Within a run only its next token remains."""
        if self._run:
            token = self._run[-1]
            return bitmask.mask_of([token], len(mask)) if bitmask.contains(mask, token) else mask
        if bitmask.count(mask) > MAX_NARROWED:
            return mask
        legal = bitmask.tokens_of(mask)
        table, control = self._canonical.tokens, self._canonical.control
        texts = {i: table[i] for i in legal if i not in control and i < len(table)}
        known = set(texts.values())
        shorter = {t[:n] for t in known for n in range(1, len(t))} & known  # others go on from it
        broken = {
            i
            for i, text in texts.items()
            if (text in shorter or any(text[:n] in shorter for n in range(1, len(text))))
            and self._breaks(i, legal, matcher)
        }
        return bitmask.without(mask, broken) if broken else mask

    def _breaks(self, token: int, legal: list[int], matcher: LLMatcher) -> bool:
        """True if the tokenizer writes `token` and the forced text after it with another token."""
        probe = matcher.deep_copy()
        probe.consume_token(token)
        forced = probe.compute_ff_bytes()[:TAIL].partition(SPECIAL)[0]
        whole = (self._canonical.tokens[token] + forced).decode("utf-8", "ignore").encode()
        if not forced or len(whole) <= len(self._canonical.tokens[token]):
            return False
        first = self._canonical.continuation(self._tail, whole)[:1]
        return bool(first) and first[0] != token and first[0] in legal


def _any_legal(tokens: npt.NDArray[np.int64], matcher: LLMatcher) -> bool:
    """True if any of `tokens` may come next."""
    if len(tokens) < MAX_NARROWED:
        return any(matcher.validate_tokens([t]) for t in tokens.tolist())
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
    return bitmask.contains_any(mask, tokens)
