"""LLaVA-NeXT's pictures: the whole in one tile, then fitted into the best of several sizes and cut
into tiles by rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.errors import CheckpointError
from octavo.vision.image import ImageInput, Pixels
from octavo.vision.preprocess import Detail, Processed
from octavo.vision.resize import Size, cut, number, resized

if TYPE_CHECKING:
    from PIL.Image import Image

SIZES = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]  # transformers' defaults
MOST_SIZES, MOST_TILES = 256, 64


@dataclass(frozen=True)
class Tiling:
    """sizes: heights and widths in tiles that pictures are fitted into. size: pixels a side of a
    tile; side: tokens a side of it."""

    sizes: tuple[Size, ...]
    size: int
    side: int

    @classmethod
    def of(cls, metadata: Mapping[str, Any], size: int, side: int) -> Tiling:
        """From a model's `image_grid_pinpoints`. Raises CheckpointError."""
        given, what = metadata.get("image_grid_pinpoints") or SIZES, "image_grid_pinpoints"
        if not isinstance(given, list) or len(given) > MOST_SIZES:
            raise CheckpointError(f"{what} is {str(given)[:40]}")
        found = []
        for pair in given:
            if not isinstance(pair, list) or len(pair) != 2:
                raise CheckpointError(f"{what} has {str(pair)[:40]}")
            down, across = (number(pixels, what) for pixels in pair)
            if down % size or across % size or down * across > MOST_TILES * size**2:
                raise CheckpointError(
                    f"{what} has {down} x {across} pixels, for up to {MOST_TILES} tiles of {size}"
                )
            found.append((down // size, across // size))
        return cls(tuple(found), size, side)

    def shape(self, size: Size) -> Size:
        """Rows and columns of tiles for a picture: those that keep most of it, then those that are
        padded least."""
        height, width = size

        def worth(shape: Size) -> tuple[int, int]:
            down, across = shape[0] * self.size, shape[1] * self.size
            scale = min(across / width, down / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - down * across

        return max(self.sizes, key=worth)  # the first of equals

    def kept(self, size: Size) -> tuple[Size, Size]:
        """Tokens above and left of a picture in its tiles, which are padding, and its height and
        width in tokens."""
        (height, width), (rows, columns) = size, self.shape(size)
        down, across = rows * self.side, columns * self.side
        if width / height > across / down:
            padding = (down - int(round(height * (across / width), 7))) // 2
            return (padding, 0), (down - 2 * padding, across)
        padding = (across - int(round(width * (down / height), 7))) // 2
        return (0, padding), (down, across - 2 * padding)

    def counts(self, size: Size) -> tuple[int, int]:
        """Tiles and tokens of a picture: each row of tokens ends with one more."""
        (rows, columns), (_, (down, across)) = self.shape(size), self.kept(size)
        return 1 + rows * columns, self.side**2 + down * (across + 1)

    @property
    def whole(self) -> tuple[int, int]:
        """Tiles and tokens of a picture in low detail."""
        return 1, self.side**2 + 1

    @property
    def most(self) -> tuple[int, int]:
        """Tiles and tokens of a picture at most."""
        side = self.side
        tokens = (side**2 + r * side * (c * side + 1) for r, c in self.sizes)
        return 1 + max(r * c for r, c in self.sizes), max(tokens)


@dataclass(frozen=True)
class LlavaNextPreprocessor:
    """tiling: of pictures; in low detail they are one tile."""

    placeholder: str
    token: int
    tiling: Tiling
    resample: int
    details: tuple[Detail, ...] = ("low", "high")

    def __call__(self, image: Image, detail: Detail, at: str) -> Processed:
        size, side = (image.height, image.width), self.tiling.size
        parts = [resized(image, (side, side), self.resample, at)]
        tokens = self.tiling.whole[1]
        if detail != "low":
            parts += self._cut(image, self.tiling.shape(size), at)
            tokens = self.tiling.counts(size)[1]
        made = ImageInput.of(np.stack(parts), size, tokens)
        return Processed(self.placeholder * tokens, (made,))

    def _cut(self, image: Image, shape: Size, at: str) -> list[Pixels]:
        """The picture in the middle of its tiles, on black."""
        side = self.tiling.size
        down, across = shape[0] * side, shape[1] * side
        by_width, by_height = across / image.width, down / image.height
        if by_width < by_height:
            height, width = min(math.ceil(image.height * by_width), down), across
        else:
            height, width = down, min(math.ceil(image.width * by_height), across)
        whole = np.zeros((down, across, 3), np.uint8)
        top, left = (down - height) // 2, (across - width) // 2
        fitted = resized(image, (height, width), self.resample, at)
        whole[top : top + height, left : left + width] = fitted
        return cut(whole, side)
