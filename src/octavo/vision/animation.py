"""Animated files (GIF, WebP, PNG) as videos: how many frames they have, and how long these last, is
read from the file before any is decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from octavo.errors import InvalidValue
from octavo.vision.clip import Clip
from octavo.vision.decode import ImageFileBytes, broken_file, check_area, open_image, to_rgb

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_FRAMES = 4096  # of a file
MOST_PIXELS = 1 << 30  # of all its frames: each is decoded to get at the next
SHORTEST, USUAL = 0.02, 0.1  # seconds: what lasts less is shown for the usual time, as browsers do


def decode_animation(data: bytes, at: str, wanted: float | None = None) -> Clip:
    """The video in a GIF, WebP or PNG file; a still picture is one of one frame. wanted: frames a
    second that are shown. Raises RequestError naming `at`."""
    opened = open_image(data, at, "GIF, WebP, PNG or JPEG")
    width, height = opened.size
    check_area(width, height, at)
    try:
        seconds = list(_durations(opened.format or "", ImageFileBytes(data)))
    except (IndexError, OSError) as e:
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


def _durations(kind: str, file: ImageFileBytes) -> Iterator[float]:
    """Seconds of each frame. Raises IndexError for a truncated file, OSError for too many parts."""
    if kind == "GIF":
        yield from _gif_durations(file)
    elif kind == "WEBP":
        for name in _riff_chunks(file):
            if name == b"ANMF":
                yield int.from_bytes(file.read(15)[12:], "little") / 1000
    elif kind == "PNG":
        for name in _png_chunks(file):
            if name == b"fcTL":
                control = file.read(24)
                above, below = (int.from_bytes(control[i : i + 2]) for i in (20, 22))
                yield above / (below or 100)


def _riff_chunks(file: ImageFileBytes) -> Iterator[bytes]:
    """Names of the chunks of a WebP file, which stands where what they hold begins."""
    file.seek(12)
    while len(head := file.read(8)) == 8:
        length = int.from_bytes(head[4:], "little")
        end = file.tell() + length + length % 2
        yield head[:4]
        file.seek(end)


def _png_chunks(file: ImageFileBytes) -> Iterator[bytes]:
    """Likewise of a PNG file."""
    file.seek(8)
    while len(head := file.read(8)) == 8:
        end = file.tell() + int.from_bytes(head[:4]) + 4
        yield head[4:]
        file.seek(end)


def _gif_durations(file: ImageFileBytes) -> Iterator[float]:
    def skip_table(flags: int) -> None:
        """To the end of a table of colors."""
        if flags & 0x80:
            file.seek(3 << ((flags & 7) + 1), 1)

    def skip_blocks() -> None:
        while size := file.read(1)[0]:
            file.seek(size, 1)

    skip_table(file.read(13)[10])
    hundredths = 0
    while kind := file.read(1):
        if kind == b"\x21":  # an extension, of which one says how long the next frame lasts
            if file.read(1) == b"\xf9":
                control = file.read(5)
                hundredths = int.from_bytes(control[2:4], "little")
                file.seek(-5, 1)
            skip_blocks()
        elif kind == b"\x2c":
            skip_table(file.read(9)[8])
            file.seek(1, 1)
            skip_blocks()
            yield hundredths / 100
            hundredths = 0
        else:
            return
