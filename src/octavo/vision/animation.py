"""Animated files (GIF, WebP, PNG) as videos: how many frames they have, and how long these last, is
read from the file before any is decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from octavo.errors import InvalidValue
from octavo.vision.clip import Clip
from octavo.vision.decode import broken_file, check_area, open_image, to_rgb

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_FRAMES = 4096  # of a file
MOST_PIXELS = 1 << 30  # of all its frames: each is decoded to get at the next
MATROSKA = b"\x1aE\xdf\xa3"
SHORTEST, USUAL = 0.02, 0.1  # seconds: what lasts less is shown for the usual time, as browsers do


def decode_animation(data: bytes, at: str, wanted: float | None = None) -> Clip:
    """The video in a GIF, WebP or PNG file; a still picture is one of one frame. wanted: frames a
    second that are shown. Raises RequestError naming `at`."""
    if data[4:8] == b"ftyp" or data.startswith(MATROSKA):
        raise InvalidValue(f"{at} is an MP4, MOV, WebM or MKV file: send its frames as a list", at)
    opened = open_image(data, at, "GIF, WebP, PNG or JPEG")
    width, height = opened.size
    check_area(width, height, at)
    try:
        seconds = list(_durations(opened.format or "", data))
    except IndexError as e:
        raise broken_file(at) from e
    check_frames(len(seconds), width, height, at)
    count = max(1, len(seconds))
    # A PNG file may have a picture before the animation, for readers that know no animations.
    before = int(getattr(opened, "n_frames", count)) - count if opened.format == "PNG" else 0
    total = sum(s if s >= SHORTEST else USUAL for s in seconds) or USUAL

    def decode(numbers: Sequence[int]) -> Iterator[Image]:
        for number in numbers:
            try:
                opened.seek(before + number)
                opened.load()
            except Exception as e:  # plugins raise whatever they run into
                raise broken_file(at) from e
            yield to_rgb(opened)

    return Clip(count, count / total, decode, wanted=wanted)


def check_frames(count: int, width: int, height: int, at: str) -> None:
    """Raises InvalidValue for more frames than are decoded."""
    if count > MOST_FRAMES or count * width * height > MOST_PIXELS:
        raise InvalidValue(
            f"{at} has {count:,} frames of {width:,} x {height:,} pixels; up to {MOST_FRAMES:,}, "
            f"and {MOST_PIXELS:,} pixels in all, are taken: send a list of images", at,
        )  # fmt: skip


def _durations(kind: str, data: bytes) -> Iterator[float]:
    """Seconds of each frame. Raises IndexError for a truncated file."""
    if kind == "GIF":
        yield from _gif_durations(data)
    elif kind == "WEBP":
        for name, at in _riff_chunks(data):
            if name == b"ANMF":
                yield int.from_bytes(data[at + 12 : at + 15], "little") / 1000
    elif kind == "PNG":
        for name, at in _png_chunks(data):
            if name == b"fcTL":
                above, below = (int.from_bytes(data[i : i + 2]) for i in (at + 20, at + 22))
                yield above / (below or 100)


def _riff_chunks(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Names of the chunks of a WebP file, and where what they hold begins."""
    at = 12
    while at + 8 <= len(data):
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        yield data[at : at + 4], at + 8
        at += 8 + length + length % 2


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Likewise of a PNG file."""
    at = 8
    while at + 8 <= len(data):
        yield data[at + 4 : at + 8], at + 8
        at += 12 + int.from_bytes(data[at : at + 4])


def _gif_durations(data: bytes) -> Iterator[float]:
    def table(flags: int) -> int:
        """Bytes of a table of colors."""
        return 3 << ((flags & 7) + 1) if flags & 0x80 else 0

    def end(at: int) -> int:
        """Behind the blocks that begin here."""
        while size := data[at]:
            at += size + 1
        return at + 1

    at, hundredths = 13 + table(data[10]), 0
    while at < len(data):
        if data[at] == 0x21:  # an extension, of which one says how long the next frame lasts
            if data[at + 1] == 0xF9:
                hundredths = int.from_bytes(data[at + 4 : at + 6], "little")
            at = end(at + 2)
        elif data[at] == 0x2C:
            at = end(at + 11 + table(data[at + 9]))
            yield hundredths / 100
            hundredths = 0
        else:
            return
