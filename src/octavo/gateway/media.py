"""Finds the images in the body of a request, whichever dialect it is of, without decoding them.

A string is one that is a `data:` URL, or long and nothing but base64, and so is the address that a
field `image_url` has. Videos and sounds come in the same ways, and cost an encoder likewise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from zlib import crc32

SIGNS = (b"image", b"video", b"audio")  # one of them is in every body that has any
OPAQUE = (b"signature", b"encrypted_content")  # fields of base64 that is none
LONG = 1024  # bytes of a string from which on it may be data
HEAD = 128  # bytes that a `data:` URL begins with, at most
TAIL = 256  # bytes at the end of it that are looked at: prose has a space among them
BASE64 = re.compile(rb"(?:[A-Za-z0-9+/_-]|\\/)+={0,2}")  # some write \/ for /
ADDRESS = re.compile(rb'"(?:image|video)_url"\s*:\s*(?:\{\s*"url"\s*:\s*)?"(https?://[^"]*)"')
MOST_STRINGS = 1 << 16  # of a body that is looked through
MOST_IMAGES = 256


@dataclass(frozen=True)
class PromptText:
    """A prompt as it is written, but for the data of its images: these are numbers, by content."""

    text: bytes
    images: tuple[int, ...] = ()


def read_media(text: bytes) -> PromptText:
    """What is text in a prompt, and its images."""
    if not any(sign in text for sign in SIGNS) or text.count(b'"') > 2 * MOST_STRINGS:
        return PromptText(text)
    parts, images = text.split(b'"'), []
    for i, part in enumerate(parts):
        if _is_data(part) and parts[max(i - 2, 0)] not in OPAQUE:
            number = hash((crc32(part), len(part)))
            images.append(number)
            parts[i] = b"%x" % (number & (1 << 64) - 1)
    images += [hash((crc32(found), len(found))) for found in ADDRESS.findall(text)]
    return PromptText(b'"'.join(parts), tuple(images[:MOST_IMAGES]))


def _is_data(part: bytes) -> bool:
    if part.startswith(b"data:"):
        return b";base64," in part[:HEAD]
    return len(part) >= LONG and BASE64.fullmatch(part, len(part) - TAIL) is not None
