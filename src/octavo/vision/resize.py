"""Sizes and cuts of pictures, byte for byte as reference processors make them with Pillow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo import _native
from octavo.errors import CheckpointError
from octavo.vision.decode import check_area
from octavo.vision.image import ImageInput, Pixels

if TYPE_CHECKING:
    from PIL.Image import Image

NEAREST, BICUBIC = 0, 3  # Pillow's numbers, which files of processors have too
MAX_SIDE = 1 << 14
PART = 1 << 18  # pixels that are surely in one block of memory
Size = tuple[int, int]  # height and width


def resized(picture: Image | Pixels, size: Size, resample: int, at: str) -> Pixels:
    """A picture in RGB stretched to a height and width, as `[height, width, 3]`; resample: Pillow's
    number of a filter. Raises RequestError for too many pixels."""
    from PIL import Image as library

    check_area(size[1], size[0], at)
    pixels = picture if isinstance(picture, np.ndarray) else pixels_of(picture)
    if pixels.shape[:2] == size:
        return pixels
    if resample == NEAREST:
        return np.asarray(
            library.fromarray(pixels).resize((size[1], size[0]), library.Resampling.NEAREST)
        )
    return _native.resize_picture("", pixels, *size, resample)


def pixels_of(image: Image) -> Pixels:
    """A picture in RGB as `[height, width, 3]`; several times as fast as by `numpy.asarray`."""
    try:
        parts = [image.__arrow_c_array__()]
    except ValueError:  # Pillow has it in several blocks of memory
        step = max(1, PART // image.width)
        tops = range(0, image.height, step)
        bands = [(0, y, image.width, min(y + step, image.height)) for y in tops]
        parts = [image.crop(band).__arrow_c_array__() for band in bands]
    return _native.rgb_pixels([pixels for _, pixels in parts], image.width)


def centered(pixels: Pixels, size: Size) -> Pixels:
    """The middle of a picture; black surrounds one that is smaller."""
    out = np.zeros((*size, 3), np.uint8)
    (top, into_top), (left, into_left) = (
        (max(0, (old - new) // 2), max(0, -((old - new) // 2)))
        for old, new in zip(pixels.shape, size, strict=False)
    )
    part = pixels[top : top + size[0] - into_top, left : left + size[1] - into_left]
    out[into_top : into_top + len(part), into_left : into_left + part.shape[1]] = part
    return out


def padded_square(image: Image, color: tuple[int, ...]) -> Image:
    """The picture in the middle of a square of its longer side."""
    from PIL import Image as library

    side = max(image.size)
    if image.size == (side, side):
        return image
    square = library.new("RGB", (side, side), color)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def cut(pixels: Pixels, side: int) -> list[Pixels]:
    """A picture's squares of so many pixels a side, by rows."""
    rows, columns = range(0, pixels.shape[0], side), range(0, pixels.shape[1], side)
    return [pixels[y : y + side, x : x + side] for y in rows for x in columns]


def pair(value: Any, what: str) -> Size:
    """Height and width, given as {"height", "width"} or as one number. Raises CheckpointError."""
    if isinstance(value, Mapping):
        sides = (value.get("height"), value.get("width"))
    else:
        sides = (value, value)
    return number(sides[0], what), number(sides[1], what)


def number(value: Any, what: str, most: int = MAX_SIDE) -> int:
    """A count of pixels or tiles from a file. Raises CheckpointError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise CheckpointError(f"{what} of the image processor is {str(value)[:40]}")
    return value


def _color(mean: Any) -> tuple[int, ...]:
    """Three bytes for a mean of channels. Raises CheckpointError."""
    kinds = {type(v) for v in mean} if isinstance(mean, list | tuple) and len(mean) == 3 else {None}
    if not kinds <= {int, float} or not all(0 <= v <= 1 for v in mean):
        raise CheckpointError(f"image_mean of the image processor is {str(mean)[:40]}")
    return tuple(int(value * 255) for value in mean)


@dataclass(frozen=True)
class Framing:
    """How CLIP's processor frames a picture.

    Its shorter side becomes `shortest`, or all of it is stretched to `size`; the middle is cut out
    (`crop`). pad: before all, it becomes a square with this color around it.
    """

    shortest: int = 0
    size: Size | None = None
    crop: Size | None = None
    pad: tuple[int, ...] | None = None
    resample: int = BICUBIC

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Framing:
        """From a processor's settings. Raises CheckpointError."""
        if settings.get("do_resize") is False:
            raise CheckpointError("this image processor resizes nothing")
        given, shortest, size = settings.get("size", {"shortest_edge": 224}), 0, None
        if isinstance(given, int) or (isinstance(given, Mapping) and "shortest_edge" in given):
            edge = given if isinstance(given, int) else given["shortest_edge"]
            shortest = number(edge, "size")
        else:
            size = pair(given, "size")
        crop = None
        if settings.get("do_center_crop", True):
            crop = pair(settings.get("crop_size", 224), "crop_size")
        pad = None
        if settings.get("do_pad") and "Llava" in str(settings.get("image_processor_type")):
            pad = _color(settings.get("image_mean") or (0, 0, 0))
        resample = settings.get("resample", BICUBIC)
        resample = number(resample, "resample", 5) if resample != 0 else 0
        return cls(shortest, size, crop, pad, resample)

    @property
    def fixed(self) -> Size:
        """The size that every picture comes to have. Raises CheckpointError if there is none."""
        size = self.crop or self.size
        if size is None:
            raise CheckpointError("this image processor gives pictures of different sizes")
        return size

    def tile(self, image: Image, tokens: int, at: str) -> ImageInput:
        """The framed picture as one tile of `tokens` placeholders. Raises RequestError."""
        return ImageInput.of(self(image, at)[None], (image.height, image.width), tokens)

    def __call__(self, image: Image, at: str) -> Pixels:
        """The framed picture, as `[height, width, 3]`. Raises RequestError."""
        if self.pad is not None:
            check_area(max(image.size), max(image.size), at)
            image = padded_square(image, self.pad)
        size = self.size or shortest_edge(image, self.shortest)
        pixels = resized(image, size, self.resample, at)
        return pixels if self.crop is None else centered(pixels, self.crop)


def shortest_edge(image: Image, edge: int) -> Size:
    """The size with a shorter side of `edge` and the same proportions."""
    width, height = image.size
    longer = int(edge * max(width, height) / min(width, height))
    return (longer, edge) if width <= height else (edge, longer)
