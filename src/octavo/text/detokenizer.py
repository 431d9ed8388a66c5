"""Token ids to text, one token at a time. Incomplete UTF-8 characters are held back."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from typing import Any

from octavo.text.stop_strings import StopStrings

_BYTE = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's mapping of the 256 bytes to printable characters, inverted."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in plain}
    for n, b in enumerate(b for b in range(256) if b not in plain):
        table[chr(256 + n)] = b
    return table


def _is_byte_level(node: Any) -> bool:
    if isinstance(node, dict):
        return node.get("type") == "ByteLevel" or any(map(_is_byte_level, node.values()))
    return isinstance(node, list) and any(map(_is_byte_level, node))


def token_bytes(
    description: Any, vocabulary: Mapping[str, int], control: frozenset[int]
) -> list[bytes]:
    """The bytes of each token id. Control tokens have none."""
    out = [b""] * (max(vocabulary.values(), default=-1) + 1)
    alphabet = _byte_alphabet() if _is_byte_level(description) else None
    for token, i in vocabulary.items():
        if i in control:
            continue
        if alphabet is not None and all(c in alphabet for c in token):
            out[i] = bytes(alphabet[c] for c in token)
        elif alphabet is None and (match := _BYTE.match(token)):
            out[i] = bytes([int(match.group(1), 16)])
        else:
            out[i] = token.replace("\u2581", " ").encode() if alphabet is None else token.encode()
    return out


class Detokenizer:
    """Turns a stream of token ids into whole characters. Drops an incomplete one at the end."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that `token` completes."""
        return self._decoder.decode(self._table[token] if token < len(self._table) else b"")


class TextStream:
    """Turns a request's tokens into text, up to the first stop string."""

    def __init__(self, table: list[bytes], stops: list[str]) -> None:
        self._detokenizer = Detokenizer(table)
        self._stops = StopStrings(stops)

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def push(self, token: int | None, finish: str | None) -> tuple[str, str | None]:
        """Takes a token, an engine's finish, or both. Returns (new text, finish reason or None).

        A token with the finish "stop" is not part of the text. A token with the finish "complete"
        (a grammar has ended) is; the finish reason is "stop" for both.
        """
        text = ""
        if token is not None and finish != "stop":
            text = self._detokenizer.push(token)
        shown = self._stops.push(text)
        if self._stops.matched is not None:
            return shown, "stop"
        if finish is not None:
            return shown + self._stops.finish(), "stop" if finish == "complete" else finish
        return shown, None
