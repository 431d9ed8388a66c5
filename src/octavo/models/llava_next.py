"""LLaVA-NeXT (LLaVA 1.6): LLaVA whose pictures have several tiles, put together without their
padding, and a token that ends each row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError, Unsupported
from octavo.models import llava
from octavo.models.images import Floats
from octavo.models.metadata import Recorded
from octavo.models.vision import VisionModel
from octavo.vision.image import ImageInput
from octavo.vision.llava_next import Tiling

NEWLINE = "image_newline"


@dataclass(frozen=True, eq=False)
class Rows:
    """An Arrangement of tiles as one picture, by rows of tokens. newline: ends each."""

    tiling: Tiling
    newline: Floats

    @property
    def tiles(self) -> int:
        return self.tiling.most[0]

    @property
    def tokens(self) -> int:
        return self.tiling.most[1]

    def shape(self, image: ImageInput) -> tuple[int, int]:
        return self.tiling.whole if image.shape[0] == 1 else self.tiling.counts(image.size)

    def __call__(self, image: ImageInput, projected: Floats) -> Floats:
        side, newline = self.tiling.side, self.newline
        whole, rest = projected[: side**2], projected[side**2 :]
        if not len(rest):
            return np.concatenate([whole, newline[None]])
        rows, columns = self.tiling.shape(image.size)
        (top, left), (down, across) = self.tiling.kept(image.size)
        picture = rest.reshape(rows, columns, side, side, -1).transpose(0, 2, 1, 3, 4)
        picture = picture.reshape(rows * side, columns * side, -1)
        picture = picture[top : top + down, left : left + across]
        ends = np.broadcast_to(newline, (down, 1, len(newline)))
        lines = np.concatenate([picture, ends], axis=1).reshape(-1, len(newline))
        return np.concatenate([whole, lines])


def vision(checkpoint: Checkpoint, m: Recorded) -> VisionModel:
    """The encoder of a LLaVA-NeXT folder; m: its outer configuration. Raises CheckpointError or
    Unsupported."""
    name, one = checkpoint.path.name, llava.vision(checkpoint, m)
    if one.keep_class and one.tower.leading:
        raise Unsupported(f"{name}: vision_feature_select_strategy is 'full', with a class token")
    found = [n for n in checkpoint.tensors if n.endswith(NEWLINE)]
    if len(found) != 1:
        raise CheckpointError(f"{name}: {len(found)} tensors {NEWLINE!r}, which should be one")
    newline = checkpoint.tensor(found[0], (one.projector.output.width,)).vector()
    tiling = Tiling.of(m, one.tower.config.size, one.tower.config.side)
    return replace(one, family="llava_next", arrangement=Rows(tiling, newline))
