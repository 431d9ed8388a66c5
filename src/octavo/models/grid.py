"""Images in their own proportions: a grid of patches, squares of which become tokens. So do a
video's frames, as many at a time as a patch is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import isqrt

import numpy as np
import numpy.typing as npt

from octavo.checkpoint import Tensor
from octavo.errors import RequestError
from octavo.models.images import Floats, Ints, Layout
from octavo.program import Program
from octavo.vision.image import ImageInput
from octavo.vision.normalize import Normalization

MOST_TOKENS = 4096  # of an image, whatever a processor would let through


@dataclass(frozen=True)
class GridTower:
    """A tower and its patches: pixels a side, patches a side of a token, pictures that a patch is
    made of. window: tokens a side of the windows in which segments see each other; 0: none."""

    program: Program
    patch: int
    merge: int
    frames: int
    window: int = 0


@dataclass(frozen=True)
class GridVision:
    """A Vision whose images keep their proportions. video: the placeholder of frames. tokens: most
    of an image. table: of a square grid of positions, which is fitted to an image's; it lies beside
    each patch's pixels."""

    family: str
    tower: GridTower
    projectors: tuple[Program, ...]
    normalization: Normalization
    placeholder: int
    video: int
    tokens: int
    mutual: bool = False
    table: Tensor | None = None

    @property
    def size(self) -> int:
        """Pixels a side of a token."""
        return self.tower.patch * self.tower.merge

    @property
    def most(self) -> tuple[int, int, int]:
        return self.tokens * self.tower.merge**2, 1, self.tokens

    def check(self, image: ImageInput) -> None:
        tiles, height, width, _ = image.shape
        frames = 1 if image.time is None else self.tower.frames
        rest = height % self.size or width % self.size or not height * width
        if tiles != frames or rest or len(image.pixels) != 3 * tiles * height * width:
            raise RequestError(
                f"an image is {list(image.shape)}; this model takes whole multiples of {self.size} "
                f"pixels, {frames} at a time", "images", "invalid_value",
            )  # fmt: skip
        tokens = height * width // self.size**2
        if image.tokens != tokens or tokens > self.tokens:
            raise RequestError(
                f"an image has {image.tokens} placeholders; it fills {tokens}, and this model "
                f"takes up to {self.tokens}", "images", "invalid_value",
            )  # fmt: skip

    def _grid(self, image: ImageInput) -> tuple[int, int]:
        """Tokens down and across."""
        return image.shape[1] // self.size, image.shape[2] // self.size

    def layout(self, image: ImageInput) -> Layout:
        (down, across), time = self._grid(image), image.time or 0
        layout = _layout(down, across, self.tower.merge, self.tower.window)
        if image.time is None:
            return layout
        assert layout.places is not None
        places = layout.places + np.array([[time], [0], [0]], np.int32)
        advance = max(time + 1, layout.advance) if image.last else 0
        return replace(layout, places=places, advance=advance)

    def patches(self, image: ImageInput) -> Floats:
        """`[rows, 3 * frames * patch * patch]`: features by channel, picture, row and column; then
        those of the position."""
        t, (tiles, height, width, _) = self.tower, image.shape
        places = self.layout(image).coordinates
        assert places is not None
        first = (places[0] * width + places[1]) * t.patch
        rows = self.normalization.patches(
            image.array, first, t.patch, t.frames, height if tiles > 1 else 0
        )
        if self.table is None:
            return rows
        sides = (height // t.patch, width // t.patch)
        return np.concatenate([rows, _fitted(self.table.vector(), places, sides)], axis=1)

    def merged(self, image: ImageInput, states: Floats) -> Floats:
        """A token's states next to each other, tokens by rows and columns."""
        down, across = self._grid(image)
        tokens = states.reshape(down * across, -1)
        out = np.empty_like(tokens)
        out[_order(down, across, self.tower.window)] = tokens
        return out

    def embeddings(self, image: ImageInput, projected: Floats) -> Floats:
        return projected


def _fitted(table: Floats, places: Ints, sides: tuple[int, int]) -> Floats:
    """A square table's values at places in a grid of these sides, whose corners are the table's:
    between its four neighbours in proportion, in fp32."""
    side = isqrt(len(table))
    taps: list[npt.NDArray[np.intp]] = [np.zeros(places.shape[1], np.intp)]
    weights = [np.ones(places.shape[1], np.float32)]
    for place, size in zip(places, sides, strict=True):
        at = place.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
        low = np.floor(at)
        part, below = at - low, low.astype(np.intp)
        pairs = ((below, 1 - part), (np.minimum(below + 1, side - 1), part))
        taps = [t * side + tap for t in taps for tap, _ in pairs]
        weights = [w * weight for w in weights for _, weight in pairs]
    out = np.zeros((places.shape[1], table.shape[1]), np.float32)
    for tap, weight in zip(taps, weights, strict=True):
        out += table[tap] * weight[:, None]
    return out


def _windows(down: int, across: int, window: int) -> Ints:
    """The number of each token's window, by rows and columns."""
    if not window:
        return np.zeros(down * across, np.int32)
    row, column = np.divmod(np.arange(down * across, dtype=np.int32), np.int32(across))
    numbers: Ints = row // window * -(-across // window) + column // window
    return numbers


def _order(down: int, across: int, window: int) -> npt.NDArray[np.intp]:
    """Tokens as the tower takes them: one window after the other."""
    return np.argsort(_windows(down, across, window), kind="stable")


@lru_cache(64)
def _layout(down: int, across: int, merge: int, window: int) -> Layout:
    order, each = _order(down, across, window), merge * merge
    row, column = (v.astype(np.int32) for v in np.divmod(np.arange(down * across), across))
    inner_row, inner_column = np.divmod(np.arange(each, dtype=np.int32), np.int32(merge))
    coordinates = np.stack([
        (row[order][:, None] * merge + inner_row).ravel(),
        (column[order][:, None] * merge + inner_column).ravel(),
    ])  # fmt: skip
    segments = np.repeat(_windows(down, across, window)[order], each) if window else None
    return Layout(
        (down * across * each,), max(down, across), coordinates, segments,
        np.stack([np.zeros_like(row), row, column]),
    )  # fmt: skip
