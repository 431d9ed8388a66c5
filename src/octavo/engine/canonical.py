"""What a grammar forces, in the tokens that the tokenizer itself would have written it in."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = npt.NDArray[np.uint32]  # 32 tokens a word

TAIL = 64  # bytes before a forced text that its tokenization may depend on
MOST = 1024  # bytes tokenized at once
FEW = 128  # legal tokens, among which those that break up a forced text are looked for
# Words with the space before them, white space, and never much of anything.
_WORD = re.compile(rb"\s{1,64}(?= \S)| ?[^\s]{1,64}|\s{1,64}")
_CHARACTER = re.compile(rb"[\x00-\x7f]|[\xc0-\xff][\x80-\xbf]*|.", re.DOTALL)
_NEVER = 1 << 62
SPECIAL = b"\xff["  # begins a control token in what llguidance forces: \xff[ID]


def mask_of(tokens: list[int], words: int) -> Mask:
    """The mask of exactly these tokens."""
    bits = np.zeros(words * 32, bool)
    bits[tokens] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def tokens_of(mask: Mask) -> list[int]:
    """The tokens of a mask, in order. Meant for masks of few tokens."""
    words = np.flatnonzero(mask)
    bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(len(words), 32)
    rows, columns = np.nonzero(bits)
    return [int(i) for i in words[rows] * 32 + columns]


class Canonical:
    """A vocabulary as byte-pair encoding uses it: of all neighbours, those are joined first whose
    joint token was learned first, which is the one with the lowest id.

    That makes the tokenizer's own tokens of nearly every text without a second tokenizer (hundreds
    of MB for a large vocabulary) in the engine. tokens: every token's bytes; control: ids that no
    text is tokenized to.
    """

    def __init__(self, tokens: list[bytes], control: list[int]) -> None:
        self.tokens = tokens
        self.control = frozenset(control)
        spoken = [i for i, b in enumerate(tokens) if b and i not in self.control]
        self._known = {tokens[i]: i for i in spoken}
        self._bytewise = any(len(t) > 1 and not _whole(t) for t in self._known)  # joins bytes
        spoken.sort(key=tokens.__getitem__)
        self._texts = [tokens[i] for i in spoken]
        self._ids = np.array(spoken)
        self._longest = max(map(len, self._texts), default=0)

    def continuation(self, before: bytes, text: bytes) -> list[int]:
        """Ids of `text` where it follows `before`; [] where the vocabulary cannot write it.

        Where a token would straddle that place, `text` is tokenized as if nothing were before it.
        """
        for context in (before, b""):
            ids: list[int] = []
            for word in _WORD.findall(context + text):
                ids += self._word(word)
            left, first = len(text), len(ids)
            while left > 0 and first > 0:
                first -= 1
                left -= len(self.tokens[ids[first]])
            if left == 0 and b"".join(self.tokens[i] for i in ids[first:]) == text:
                return ids[first:]
        return []

    def _word(self, word: bytes) -> list[int]:
        parts: list[bytes] = []
        for char in _CHARACTER.findall(word):
            whole = char in self._known and not self._bytewise
            parts += [char] if whole else [bytes([b]) for b in char]
        known = self._known
        while len(parts) > 1:
            pairs = [known.get(a + b, _NEVER) for a, b in pairwise(parts)]
            least = min(pairs)
            if least == _NEVER:
                break
            at = pairs.index(least)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [known[p] for p in parts if p in known]

    def longer(self, text: bytes) -> npt.NDArray[np.int64]:
        """Tokens that begin with `text` and go on."""
        start = bisect_right(self._texts, text)
        end = bisect_left(self._texts, text + b"\xff" * (self._longest + 1))
        return self._ids[start:end]


def _whole(text: bytes) -> bool:
    """Whether bytes are whole characters."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


class ForcedRun:
    """The tokens that a grammar forces next, a function of the tokens before them alone.

    A run ends before a token in whose place a longer one, reaching into what is not forced, might
    come: that choice is the model's.
    """

    def __init__(self, canonical: Canonical) -> None:
        self._canonical = canonical
        self._tail = b""  # what was written last
        self._run: list[int] = []  # last first

    def fork(self) -> ForcedRun:
        """An independent copy."""
        copy = ForcedRun(self._canonical)
        copy._tail, copy._run = self._tail, list(self._run)
        return copy

    def push(self, token: int, matcher: LLMatcher) -> None:
        """Follows a token that `matcher` has just taken."""
        special = token in self._canonical.control
        self._tail = b"" if special else (self._tail + self._canonical.tokens[token])[-TAIL:]
        followed = bool(self._run) and self._run.pop() == token
        if not followed or not self._run:
            self.begin(matcher)

    def begin(self, matcher: LLMatcher) -> None:
        """Finds the tokens that are forced from where `matcher` stands."""
        self._run = []
        forced = matcher.deep_copy().compute_ff_bytes()  # which moves it past control tokens
        if not forced:
            return
        text, special, rest = forced.partition(SPECIAL)
        if not text:
            self._run = [int(rest[: rest.index(b"]")])]
            return
        cut = len(text) > MOST  # there is more: what is near the end depends on it
        text = text[:MOST].decode("utf-8", "ignore").encode()  # whole characters
        run = self._canonical.continuation(self._tail, text)
        run = run[: matcher.validate_tokens(run)]
        if cut:
            run = self._before(run, len(text) - TAIL)
        elif not special:
            run = run[: self._fixed(run, matcher.deep_copy())]
        self._run = run[::-1]

    def _before(self, run: list[int], end: int) -> list[int]:
        """The tokens of a run that are over by byte `end`."""
        ends = accumulate(len(self._canonical.tokens[t]) for t in run)
        return [t for t, at in zip(run, ends, strict=True) if at <= end]

    def _fixed(self, run: list[int], probe: LLMatcher) -> int:
        """How many tokens of a run no longer token could replace."""
        rest = b"".join(self._canonical.tokens[i] for i in run)
        for done, token in enumerate(run):
            longer = self._canonical.longer(rest)
            if len(longer) and _any_legal(longer, probe):
                return done
            probe.consume_token(token)
            rest = rest[len(self._canonical.tokens[token]) :]
        return len(run)

    def narrow(self, mask: Mask, matcher: LLMatcher) -> Mask:
        """A mask of legal tokens without those that break up what is forced, as far as others are
        left: the next token of a run alone, or none that the tokenizer would not begin with."""
        if self._run:
            token = self._run[-1]
            if mask[token >> 5] >> np.uint32(token & 31) & 1:
                return mask_of([token], len(mask))
            return mask
        if int(np.bitwise_count(mask).sum()) > FEW:
            return mask
        legal = tokens_of(mask)
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
        return mask_of([i for i in legal if i not in broken], len(mask)) if broken else mask

    def _breaks(self, token: int, legal: list[int], matcher: LLMatcher) -> bool:
        """Whether what is forced after a token is usually written with another in its place."""
        probe = matcher.deep_copy()
        probe.consume_token(token)
        forced = probe.compute_ff_bytes()[:TAIL].partition(SPECIAL)[0]
        whole = (self._canonical.tokens[token] + forced).decode("utf-8", "ignore").encode()
        if not forced or len(whole) <= len(self._canonical.tokens[token]):
            return False
        first = self._canonical.continuation(self._tail, whole)[:1]
        return bool(first) and first[0] != token and first[0] in legal


def _any_legal(tokens: npt.NDArray[np.int64], matcher: LLMatcher) -> bool:
    """Whether any of `tokens` may come next."""
    if len(tokens) < FEW:
        return any(matcher.validate_tokens([t]) for t in tokens.tolist())
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
    return bool((mask[tokens >> 5] >> (tokens & 31).astype(np.uint32) & 1).any())
