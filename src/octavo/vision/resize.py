"""Sizes and cuts of pictures, as reference processors make them with Pillow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.errors import CheckpointError
from octavo.vision.decode import check_area
from octavo.vision.image import ImageInput, Pixels

if TYPE_CHECKING:
    from PIL.Image import Image

BICUBIC = 3  # Pillow's number, which files of processors have too
MAX_SIDE = 1 << 14
Size = tuple[int, int]  # height and width


def resized(image: Image, size: Size, resample: int, at: str) -> Image:
    """The picture stretched to a height and width. Raises RequestError for too many pixels."""
    from PIL.Image import Resampling

    check_area(size[1], size[0], at)
    if image.size == (size[1], size[0]):
        return image  # which Pillow would copy
    return image.resize((size[1], size[0]), Resampling(resample))


def cropped(image: Image, size: Size) -> Image:
    """The middle of the picture; black surrounds one that is smaller."""
    top, left = (image.height - size[0]) // 2, (image.width - size[1]) // 2
    return image.crop((left, top, left + size[1], top + size[0]))


def padded_square(image: Image, color: tuple[int, ...]) -> Image:
    """The picture in the middle of a square of its longer side."""
    from PIL import Image as library

    side = max(image.size)
    if image.size == (side, side):
        return image
    square = library.new("RGB", (side, side), color)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def tiles(images: list[Image]) -> Pixels:
    """Pictures of one size as `[tiles, height, width, 3]`."""
    return np.stack([np.asarray(image) for image in images])


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
        return ImageInput.of(tiles([self(image, at)]), (image.height, image.width), tokens)

    def __call__(self, image: Image, at: str) -> Image:
        """The framed picture. Raises RequestError."""
        if self.pad is not None:
            check_area(max(image.size), max(image.size), at)
            image = padded_square(image, self.pad)
        image = resized(image, self.size or shortest_edge(image, self.shortest), self.resample, at)
        return image if self.crop is None else cropped(image, self.crop)


def shortest_edge(image: Image, edge: int) -> Size:
    """The size with a shorter side of `edge` and the same proportions."""
    width, height = image.size
    longer = int(edge * max(width, height) / min(width, height))
    return (longer, edge) if width <= height else (edge, longer)
