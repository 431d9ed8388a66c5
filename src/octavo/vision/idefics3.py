"""Idefics 3's and SmolVLM's pictures: cut into tiles in rows, then the whole once more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.vision.image import ImageInput, Pixels
from octavo.vision.preprocess import Detail, Processed
from octavo.vision.resize import Size, cut, resized

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST = 4096  # pixels of the longer side, whatever a file says
FAKE, GLOBAL = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True)
class Idefics3Preprocessor:
    """longest: the longer side before cutting. side: of a tile, which has `tokens` placeholders.
    splits: whether detail "auto" cuts; "low" never does, "high" always."""

    placeholder: str
    token: int
    tokens: int
    longest: int
    side: int
    resample: int
    splits: bool = True
    details: tuple[Detail, ...] = ("low", "high")

    def __call__(self, image: Image, detail: Detail, at: str) -> Processed:
        size, side = (image.height, image.width), self.side
        pixels = resized(image, self._within(size) if self.longest else size, self.resample, at)
        parts: list[Pixels] = []
        rows = columns = 0
        if detail == "high" or (detail == "auto" and self.splits):
            pixels = resized(pixels, self._whole_tiles(pixels), self.resample, at)
            if pixels.shape[:2] != (side, side):
                rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
                parts = cut(pixels, side)
        parts.append(resized(pixels, (side, side), self.resample, at))
        made = [ImageInput.of(part[None], size, self.tokens) for part in parts]
        return Processed(self._text(rows, columns), tuple(made))

    def _within(self, size: Size) -> Size:
        """The size with a longer side of `longest`, the shorter one made even."""
        height, width = size
        aspect = width / height
        if width >= height:
            width, height = self.longest, int(self.longest / aspect)
            height += height % 2
        else:
            height, width = self.longest, int(self.longest * aspect)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        aspect = width / height
        if width >= height and width > LARGEST:
            width, height = LARGEST, int(LARGEST / aspect)
        elif height > width and height > LARGEST:
            height, width = LARGEST, int(LARGEST * aspect)
        return max(height, 1), max(width, 1)

    def _whole_tiles(self, pixels: Pixels) -> Size:
        """The size in whole tiles that is next to a picture's."""
        height, width = pixels.shape[:2]
        aspect, side = width / height, self.side
        if width >= height:
            width = math.ceil(width / side) * side
            height = math.ceil(int(width / aspect) / side) * side
        else:
            height = math.ceil(height / side) * side
            width = math.ceil(int(height * aspect) / side) * side
        return height, width

    def _text(self, rows: int, columns: int) -> str:
        seen = self.placeholder * self.tokens
        cut = "".join(
            "".join(f"{FAKE}<row_{r + 1}_col_{c + 1}>{seen}" for c in range(columns)) + "\n"
            for r in range(rows)
        )
        return f"{cut}{chr(10) if rows else ''}{FAKE}{GLOBAL}{seen}{FAKE}"
