"""Videos before any of their frames is decoded, and what makes encoder inputs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.vision.preprocess import Processed

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Clip:
    """A video. count: frames; rate: how many a second. decode: gives those of ascending numbers, in
    RGB, one after the other. sampled: its frames were chosen before, and all of them are shown;
    else as many a second as `wanted`, or as the model is made for."""

    count: int
    rate: float
    decode: Callable[[Sequence[int]], Iterator[Image]]
    sampled: bool = False
    wanted: float | None = None


class VideoPreprocessor(Protocol):
    """How a family takes videos. placeholder: what its chat template writes for one; token: the id
    of their tokens. frames: the most that it is shown of one."""

    @property
    def placeholder(self) -> str: ...

    @property
    def token(self) -> int: ...

    @property
    def frames(self) -> int: ...

    def __call__(self, clip: Clip, at: str) -> Processed:
        """Raises RequestError naming `at`."""
        ...
