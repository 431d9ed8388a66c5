"""Qwen2-VL's pictures: in their own proportions, in whole squares of patches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import InvalidValue
from octavo.vision.image import ImageInput
from octavo.vision.preprocess import Detail, Processed
from octavo.vision.resize import Size, resized, tiles

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ASPECT = 200
LOW = 512 * 512  # pixels at most with detail "low"


@dataclass(frozen=True)
class Qwen2VLPreprocessor:
    """least, most: pixels after resizing. square: pixels a side of what a token stands for."""

    placeholder: str
    token: int
    least: int
    most: int
    square: int
    resample: int
    details: tuple[Detail, ...] = ("low", "high")

    def __call__(self, image: Image, detail: Detail, at: str) -> Processed:
        most = min(self.most, max(LOW, self.least)) if detail == "low" else self.most
        size = self._size((image.height, image.width), most, at)
        pixels = tiles([resized(image, size, self.resample, at)])
        tokens = size[0] * size[1] // self.square**2
        made = ImageInput.of(pixels, (image.height, image.width), tokens)
        return Processed(self.placeholder * tokens, (made,))

    def _size(self, size: Size, most: int, at: str) -> Size:
        """The nearest size in whole squares with few enough pixels, and enough."""
        (height, width), square = size, self.square
        if max(size) > MAX_ASPECT * min(size):
            raise InvalidValue(
                f"{at} is {width} x {height}; a side may be {MAX_ASPECT} times the other at most",
                at,
            )
        high, wide = round(height / square) * square, round(width / square) * square
        if high * wide > most:
            shrink = math.sqrt(height * width / most)
            high = max(square, math.floor(height / shrink / square) * square)
            wide = max(square, math.floor(width / shrink / square) * square)
        elif high * wide < self.least:
            grow = math.sqrt(self.least / (height * width))
            high = math.ceil(height * grow / square) * square
            wide = math.ceil(width * grow / square) * square
        return high, wide
