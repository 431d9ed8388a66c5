"""What makes embeddings of images: two programs, and how pixels become rows of the first and its
states rows of the second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError, RequestError
from octavo.models.vit import Vit
from octavo.program import Program
from octavo.vision.image import ImageInput
from octavo.vision.normalize import Normalization

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class VisionModel:
    """How one family encodes images.

    family: its model_type. projector: states to embeddings of the language model, after `merge` x
    `merge` neighbours have been made one row, next to each other or as their mean. placeholder: the
    token whose embeddings an image's take the place of. keep_class: the class token's state is
    kept. mutual: an image's tokens see each other, also later ones.
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

    @property
    def size(self) -> int:
        """Pixels a side of an image or tile."""
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
    def width(self) -> int:
        """Of the embeddings."""
        return self.projector.output.width

    def check(self, image: ImageInput) -> None:
        """Raises RequestError for an image that this model cannot take."""
        shape, size = image.shape, self.size
        if shape != (1, size, size, 3) or len(image.pixels) != size * size * 3:
            raise RequestError(
                f"an image is {list(shape)}; this model takes [1, {size}, {size}, 3]", "images",
                "invalid_value",
            )  # fmt: skip
        if image.tokens != self.tokens:
            raise RequestError(
                f"an image has {image.tokens} placeholders; this model fills {self.tokens}",
                "images", "invalid_value",
            )  # fmt: skip

    def patches(self, image: ImageInput) -> Floats:
        """Rows of the tower, `[rows, 3 * patch * patch]`: features by channel, row and column."""
        c = self.tower.config
        used = c.side * c.patch  # what a convolution without padding reaches
        pixels = self.normalization(image.array[0, :used, :used])
        cut = pixels.reshape(c.side, c.patch, c.side, c.patch, 3).transpose(0, 2, 4, 1, 3)
        out = np.zeros((self.rows, cut[0, 0].size), np.float32)
        out[self.tower.leading :] = cut.reshape(c.side**2, -1)
        return out

    def merged(self, states: Floats) -> Floats:
        """Rows of the projector, `[tokens, width]`, from the tower's `[rows, width]`."""
        k, side, leading = self.merge, self.tower.config.side // self.merge, self.tower.leading
        if k == 1:
            return states if self.keep_class else states[leading:]
        square = states[leading:].reshape(side, k, side, k, -1).transpose(0, 2, 1, 3, 4)
        if self.how == "mean":
            means: Floats = square.mean((2, 3), dtype=np.float32)
            return means.reshape(side * side, -1)
        return np.ascontiguousarray(square).reshape(side * side, -1)


def token_id(metadata: Mapping[str, object], name: str, *keys: str) -> int:
    """The first of these keys. Raises CheckpointError unless it is a token's number."""
    found = next((metadata[k] for k in keys if k in metadata), None)
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
