"""Tokens of one vocabulary as those of another, by their text."""

from __future__ import annotations

from octavo.engine.canonical import Canonical
from octavo.engine.constraint import TokenTable

CONTEXT = 32  # bytes of text before that are looked at


class Translation:
    """Writes what tokens of `source` say in tokens of `target`. Control tokens go by their names;
    those that the other vocabulary does not have are left out."""

    def __init__(self, source: TokenTable, target: TokenTable) -> None:
        self._bytes = source.tokens
        self._control = frozenset(source.control)
        names = {target.tokens[i]: i for i in target.control}
        self._named = {
            i: names[name] for i in source.control if (name := source.tokens[i]) in names
        }
        self._canonical = Canonical(target.tokens, target.control)

    def text(self, tokens: list[int]) -> bytes:
        """What tokens say after the last control token among them."""
        last = self.pieces(tokens)[-1]
        return last if isinstance(last, bytes) else b""

    def pieces(self, tokens: list[int]) -> list[bytes | int]:
        """Text, then control tokens of the target with the text after each."""
        out: list[bytes | int] = []
        text = b""
        for token in tokens:
            if token in self._control:
                out += [text, self._named[token]] if token in self._named else [text]
                text = b""
            elif token < len(self._bytes):
                text += self._bytes[token]
        return [*out, text]

    def write(self, pieces: list[bytes | int], before: bytes) -> tuple[list[int], bytes]:
        """Tokens of the target, and the bytes of a character at the end that is not complete.
        before: text in front."""
        out: list[int] = []
        *pieces, last = pieces
        assert isinstance(last, bytes)
        whole = last.decode("utf-8", "ignore").encode()
        whole = whole if last.startswith(whole) else last
        for piece in (*pieces, whole):
            if isinstance(piece, int):
                out.append(piece)
            else:
                out += self._canonical.continuation(before[-CONTEXT:], piece)
            before = b""
        return out, last[len(whole) :]


def same_tokens(one: TokenTable, other: TokenTable) -> bool:
    """True if whatever token is in the first table is the same in the second."""
    return one.tokens == other.tokens[: len(one.tokens)]
