"""Byte-pair encoding from a vocabulary alone: the tokens a tokenizer would write a text in."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from itertools import pairwise

import numpy as np
import numpy.typing as npt

# Words with the space before them, or white space; 64 characters at most.
_WORD = re.compile(rb"\s{1,64}(?= \S)| ?[^\s]{1,64}|\s{1,64}")
_CHARACTER = re.compile(rb"[\x00-\x7f]|[\xc0-\xff][\x80-\xbf]*|.", re.DOTALL)
_NEVER = 1 << 62


class Canonical:
    """Encodes text by joining the neighbours whose joint token has the lowest id first, which is
    the one that byte-pair encoding learned first.

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
        """Ids of `text` after the text `before`; [] if the vocabulary cannot write it.

        If a token would reach from one into the other, `text` is encoded on its own.
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
        """Ids of the tokens that begin with `text` and are longer."""
        start = bisect_right(self._texts, text)
        end = bisect_left(self._texts, text + b"\xff" * (self._longest + 1))
        return self._ids[start:end]


def _whole(text: bytes) -> bool:
    """True if `text` is valid UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
