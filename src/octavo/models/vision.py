"""What makes embeddings of square tiles: two programs, and how pixels become rows of the first and
its states rows of the second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError, RequestError
from octavo.models.images import Arrangement, Floats, Layout
from octavo.models.vit import Vit
from octavo.program import Program
from octavo.vision.image import ImageInput
from octavo.vision.normalize import Normalization


@dataclass(frozen=True)
class VisionModel:
    """A Vision of square tiles, each of which the tower sees alone.

    projector: states to embeddings of the language model, after `merge` x `merge` neighbours have
    been made one row, next to each other or as their mean. keep_class: the class token's state is
    kept. arrangement: of images of several tiles; without one each tile is an image.
    """

    family: str
    tower: Vit
    projector: Program
    normalization: Normalization
    placeholder: int
    merge: int = 1
    how: Literal["beside", "mean"] = "beside"
    keep_class: bool = False
    mutual: bool = False
    arrangement: Arrangement | None = None

    @property
    def video(self) -> None:
        return None

    @property
    def projectors(self) -> tuple[Program, ...]:
        return (self.projector,)

    @property
    def size(self) -> int:
        """Pixels a side of a tile."""
        return self.tower.config.size

    @property
    def rows(self) -> int:
        """Rows of a tile in the tower."""
        return self.tower.config.side**2 + self.tower.leading

    @property
    def tokens(self) -> int:
        """Placeholders of a tile."""
        own = self.tower.leading if self.keep_class else 0
        return (self.tower.config.side // self.merge) ** 2 + own

    @property
    def most(self) -> tuple[int, int, int]:
        a = self.arrangement
        if a is None:
            return self.rows, 1, self.tokens
        return a.tiles * self.rows, a.tiles, max(a.tokens, a.tiles * self.tokens)

    def check(self, image: ImageInput) -> None:
        shape, size, a = image.shape, self.size, self.arrangement
        tiles, tokens = (1, self.tokens) if a is None else a.shape(image)
        if shape != (tiles, size, size, 3) or len(image.pixels) != tiles * size * size * 3:
            raise RequestError(
                f"an image is {list(shape)}; this model takes [{tiles}, {size}, {size}, 3]",
                "images", "invalid_value",
            )  # fmt: skip
        if image.tokens != tokens:
            raise RequestError(
                f"an image has {image.tokens} placeholders; this model fills {tokens}",
                "images", "invalid_value",
            )  # fmt: skip

    def layout(self, image: ImageInput) -> Layout:
        return Layout((self.rows,) * image.shape[0], image.tokens)

    def patches(self, image: ImageInput) -> Floats:
        """`[rows, 3 * patch * patch]`: features by channel, row and column."""
        c, (tiles, height, width, _) = self.tower.config, image.shape
        tile, row, column = np.ogrid[:tiles, : c.side, : c.side]
        first = np.full((tiles, self.rows), -1, np.int32)
        places = (tile * height + row * c.patch) * width + column * c.patch
        first[:, self.tower.leading :] = places.reshape(tiles, -1)
        return self.normalization.patches(image.array, first.ravel(), c.patch)

    def merged(self, image: ImageInput, states: Floats) -> Floats:
        tiles = states.reshape(image.shape[0], self.rows, -1)
        return np.concatenate([self._merged(tile) for tile in tiles])

    def _merged(self, states: Floats) -> Floats:
        """Those of a tile."""
        k, side, leading = self.merge, self.tower.config.side // self.merge, self.tower.leading
        if k == 1:
            return states if self.keep_class else states[leading:]
        square = states[leading:].reshape(side, k, side, k, -1).transpose(0, 2, 1, 3, 4)
        if self.how == "mean":
            means: Floats = square.mean((2, 3), dtype=np.float32)
            return means.reshape(side * side, -1)
        return np.ascontiguousarray(square).reshape(side * side, -1)

    def embeddings(self, image: ImageInput, projected: Floats) -> Floats:
        return projected if self.arrangement is None else self.arrangement(image, projected)


def token_id(
    metadata: Mapping[str, object], name: str, *keys: str, default: int | None = None
) -> int:
    """The first of these keys. Raises CheckpointError unless it is a token's number."""
    found = next((metadata[k] for k in keys if k in metadata), default)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise CheckpointError(f"{name}: {keys[0]} is {str(found)[:40]}")
    return found


def find_module(checkpoint: Checkpoint, ending: str) -> str:
    """The one module whose weight's name ends so. Raises CheckpointError."""
    found = [n for n in checkpoint.tensors if n.endswith(ending + ".weight")]
    if len(found) != 1:
        raise CheckpointError(
            f"{checkpoint.path.name}: {len(found)} tensors {ending + '.weight'!r}"
        )
    return found[0].removesuffix(".weight")
