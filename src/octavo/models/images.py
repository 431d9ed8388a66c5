"""What an engine knows of a family's images: how they lie in a tower and in a prompt, and what
makes embeddings of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.program import Program
from octavo.vision.image import ImageInput

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Layout:
    """How an image lies in a tower, and in a prompt.

    spans: rows of each of its sequences, such as tiles or frames. coordinates, segments: of all
    these rows, as a step gives them. places: `[axes, tokens]`, where its tokens are in a prompt,
    from the first on; None: one after the other. advance: how much further on what follows is.
    """

    spans: tuple[int, ...]
    advance: int
    coordinates: Ints | None = None
    segments: Ints | None = None
    places: Ints | None = None

    @property
    def rows(self) -> int:
        return sum(self.spans)


class Tower(Protocol):
    """What has the program of a tower."""

    @property
    def program(self) -> Program: ...


class Vision(Protocol):
    """How one family encodes images.

    family: its model_type. placeholder: the token whose embeddings an image's take the place of;
    video: the one of a video's frames, None if it takes no videos.
    mutual: an image's tokens see each other, also later ones. size: pixels a side of a tile, or of
    a token where images keep their proportions. tokens: placeholders of a tile, or at most of such
    an image. projectors: of the tower's output and of each of its taps; what they give for a token
    lies side by side. most: rows of the largest image in the tower, its spans and its tokens.
    """

    @property
    def family(self) -> str: ...

    @property
    def placeholder(self) -> int: ...

    @property
    def video(self) -> int | None: ...

    @property
    def mutual(self) -> bool: ...

    @property
    def tower(self) -> Tower: ...

    @property
    def projectors(self) -> tuple[Program, ...]: ...

    @property
    def size(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def most(self) -> tuple[int, int, int]: ...

    def check(self, image: ImageInput) -> None:
        """Raises RequestError for an image that this model cannot take."""
        ...

    def layout(self, image: ImageInput) -> Layout: ...

    def patches(self, image: ImageInput) -> Floats:
        """Rows of the tower."""
        ...

    def merged(self, image: ImageInput, states: Floats) -> Floats:
        """Rows of a projector, from the tower's states."""
        ...

    def embeddings(self, image: ImageInput, projected: Floats) -> Floats:
        """`[tokens, width]`, from what the projectors give."""
        ...


class Arrangement(Protocol):
    """How the tokens of an image's tiles become its own. tiles: the most of an image; tokens: its
    most."""

    @property
    def tiles(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    def shape(self, image: ImageInput) -> tuple[int, int]:
        """Tiles and tokens that a picture of its size has."""
        ...

    def __call__(self, image: ImageInput, projected: Floats) -> Floats: ...
