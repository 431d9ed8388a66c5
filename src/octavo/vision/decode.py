"""Image files to RGB pixels. What a file says of itself is checked before any of it is decoded.

Pillow is imported where it is used: models of text never load it.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidValue

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

MAX_PIXELS = 24 << 20  # of a file, and of what it is resized to: 4 bytes each while it is decoded
ORIENTATION = 0x0112  # of EXIF
# Parts of a JPEG file: Pillow copies the former together for each, and looks at all the latter.
MOST_PARTS = {b"Exif\0\0": 64, b"8BIM": 4096}


class ImageFileBytes(io.BytesIO):
    """A file in memory that may be read in few pieces only, else OSError: Pillow goes through
    headers in Python, and one of millions of tiny parts would keep a processor for seconds."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._left = most_pieces(data)

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise OSError("the file has too many parts")
        return super().read(size)


def most_pieces(data: bytes) -> int:
    """Reads that a file may take: the heads of 4,096 frames, and twice those of blocks of 255 bytes
    (GIF) or of 4 KiB."""
    return (1 << 16) + len(data) // (64 if data.startswith(b"GIF") else 1024)


def decode_image(data: bytes, at: str) -> Image:
    """The upright picture in a file (PNG, JPEG, WebP or GIF), in RGB as reference processors
    convert it: transparency lies over white. Raises RequestError naming `at`."""
    opened = open_image(data, at)
    width, height = opened.size
    check_area(width, height, at)
    if getattr(opened, "is_animated", False):
        raise InvalidValue(f"{at} is an animation; send one of its frames", at)
    try:
        opened.load()
    except Exception as e:  # plugins raise whatever they run into, with addresses in it
        raise broken_file(at) from e
    return to_rgb(upright(opened))


def check_area(width: int, height: int, at: str) -> None:
    """Raises InvalidValue for more pixels than are decoded, or resized to."""
    if not 1 <= width * height <= MAX_PIXELS:
        raise InvalidValue(
            f"{at} has {width:,} x {height:,} pixels; up to {MAX_PIXELS:,} in all are taken", at
        )


def broken_file(at: str, kind: str = "image") -> InvalidValue:
    """The refusal of a file that cannot be decoded."""
    return InvalidValue(f"{at} is a damaged or truncated {kind} file", at)


def open_image(data: bytes, at: str, formats: str = "PNG, JPEG, WebP or GIF") -> ImageFile:
    """The file with its header read. The first bytes alone say which format it is. formats: those
    that are wanted. Raises RequestError naming `at`."""
    from PIL.GifImagePlugin import GifImageFile
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.PngImagePlugin import PngImageFile
    from PIL.WebPImagePlugin import WebPImageFile

    kind: Any = None
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        kind = PngImageFile
    elif data.startswith(b"\xff\xd8\xff"):
        kind = JpegImageFile
    elif data[:6] in (b"GIF87a", b"GIF89a"):
        kind = GifImageFile
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = WebPImageFile
        check_area(*_webp_size(data), at)  # its plugin allocates the picture at once
    if kind is None:
        raise InvalidValue(f"{at} is no {formats} file", at)
    if kind is JpegImageFile and any(data.count(p) > most for p, most in MOST_PARTS.items()):
        raise broken_file(at)
    try:
        opened: ImageFile = kind(ImageFileBytes(data))
    except Exception as e:
        raise broken_file(at) from e
    return opened


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height in a WebP file's header, zero if it has none."""
    kind = data[12:16]
    if kind == b"VP8X":
        return tuple(1 + int.from_bytes(data[i : i + 3], "little") for i in (24, 27))  # type: ignore[return-value]
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        return tuple(int.from_bytes(data[i : i + 2], "little") & 0x3FFF for i in (26, 28))  # type: ignore[return-value]
    return 0, 0


def upright(image: Image) -> Image:
    """The picture turned and mirrored as its EXIF data says. Data that cannot be read say
    nothing."""
    from PIL.Image import Transpose

    try:
        orientation = image.getexif().get(ORIENTATION, 1)
    except Exception:
        return image
    turns = {
        2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE, 6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }  # fmt: skip
    turn = turns.get(orientation)
    return image if turn is None else image.transpose(turn)


def to_rgb(image: Image) -> Image:
    """The picture in RGB with 8 bits a channel."""
    from PIL import Image as library

    if image.mode.startswith("I;16") or image.mode == "I":  # Pillow would clip these, not scale
        image = image.point(lambda value: value / 256).convert("L")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = library.new("RGBA", image.size, (255, 255, 255, 255))
        image = library.alpha_composite(white, image)
    return image.convert("RGB")
