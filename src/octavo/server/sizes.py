"""Limits of the sizes of a body's fields, checked on their JSON text before it is decoded.

Decoding is one call that cannot be interrupted, so its cost is bounded first, by counting bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.errors import ContextExceeded, InvalidValue

SMALL = 64 << 10  # bodies up to here are not looked at: nothing in them takes long
MAX_NESTED = 1 << 16  # objects and lists of a field that may hold anything
STRUCTURE = (b"{", b"[")
TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+"')


@dataclass(frozen=True, slots=True)
class SizeBounds:
    """The properties of a model that limit the sizes of fields."""

    context: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class AtMost:
    """A field whose JSON has at most `size` bytes and MAX_NESTED objects and lists."""

    size: int

    def check(self, text: bytes, name: str, bounds: SizeBounds) -> None:
        if len(text) > self.size:
            raise InvalidValue(f"{name} has {len(text):,} bytes; {self.size:,} at most", name)
        check_nesting([text], name)


@dataclass(frozen=True, slots=True)
class Entries:
    """Up to `most` objects with the key `key`, at any depth."""

    key: bytes
    most: int

    def check(self, text: bytes, name: str, bounds: SizeBounds) -> None:
        # A text that is a key's name counts too, hence twice as many.
        if text.count(b'"%b"' % self.key) > 2 * self.most:
            raise InvalidValue(f"{name} has over {self.most:,} with {self.key.decode()}", name)


@dataclass(frozen=True, slots=True)
class Ids:
    """A list of up to `most` token ids (0: as many as the vocabulary has)."""

    most: int = 0

    def check(self, text: bytes, name: str, bounds: SizeBounds) -> None:
        most, count = self.most or bounds.vocabulary, text.count(b",") + 1
        if count > most:
            raise InvalidValue(f"{name} has {count:,} entries; {most:,} at most", name)


@dataclass(frozen=True, slots=True)
class Texts:
    """A text, or a list of up to `most` texts or objects that hold one."""

    most: int

    def check(self, text: bytes, name: str, bounds: SizeBounds) -> None:
        count = text.count(b'"') - text.count(b'\\"')  # quotes that are no part of a text
        if not text.startswith(b'"') and count > 4 * self.most:
            raise InvalidValue(f"{name} has over {self.most:,} entries", name)


@dataclass(frozen=True, slots=True)
class Inputs:
    """A text, token ids, or a list of up to `most` of either kind."""

    most: int

    def check(self, text: bytes, name: str, bounds: SizeBounds) -> None:
        head = text[:64].translate(None, b" \t\r\n")[:2]
        if head == b'["':
            Texts(self.most).check(text, name, bounds)
            return _decodes(text, list[str], name)
        if head[:1] != b"[":
            return
        lists, ids = text.count(b"[") - 1, text.count(b",") + 1
        if lists > self.most:
            raise InvalidValue(f"{name} has over {self.most:,} entries", name)
        if b'"' in text or (lists and head != b"[["):
            raise InvalidValue(f"{name} mixes kinds of entries", name)
        if ids > max(1, lists) * (bounds.context + 1):
            raise ContextExceeded(bounds.context, ids, 0, name)


@dataclass(frozen=True, slots=True)
class Mixed:
    """A text, a list of texts and token ids, or a list of up to `most` of either."""

    most: int

    def check(self, text: bytes, name: str, bounds: SizeBounds) -> None:
        outside = TEXT.sub(b"", text)
        lists, entries = outside.count(b"[") - 1, outside.count(b",") + 1
        if lists > self.most:
            raise InvalidValue(f"{name} has over {self.most:,} entries", name)
        if entries > max(1, lists) * (bounds.context + 1):
            raise ContextExceeded(bounds.context, entries, 0, name)


def _decodes(text: bytes, kind: Any, name: str) -> None:
    try:
        msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError:
        raise InvalidValue(f"{name} mixes kinds of entries", name) from None


def check_nesting(texts: Iterable[bytes], name: str) -> None:
    """Raises RequestError where JSON of any kind holds too many objects and lists."""
    count = sum(text.count(mark) for text in texts for mark in STRUCTURE)
    if count > MAX_NESTED:
        raise InvalidValue(
            f"{name} holds {count:,} objects and lists; {MAX_NESTED:,} at most", name
        )
