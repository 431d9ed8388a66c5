"""Qwen-VL's pictures: in their own proportions, in whole tokens, within bounds of pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.errors import CheckpointError, InvalidValue
from octavo.vision.image import ImageInput
from octavo.vision.preprocess import Detail, Processed
from octavo.vision.resize import Size, number, resized

if TYPE_CHECKING:
    from PIL.Image import Image

LOW_TOKENS = 256  # of a picture in low detail
SHORTEST, LONGEST = 56 * 56, 28 * 28 * 1280  # pixels, where a file says nothing
MOST_PIXELS = 1 << 30
STEEPEST = 200  # longer to shorter side


def pixel_limits(
    settings: Mapping[str, Any], defaults: tuple[int, int] = (SHORTEST, LONGEST)
) -> tuple[int, int]:
    """The fewest and the most pixels of a picture, from a processor's settings. Raises
    CheckpointError."""
    size = settings.get("size") or {}
    if not isinstance(size, Mapping):
        raise CheckpointError(f"size of the image processor is {str(size)[:40]}")
    found = []
    for older, newer, default in (
        ("min_pixels", "shortest_edge", defaults[0]), ("max_pixels", "longest_edge", defaults[1]),
    ):  # fmt: skip
        given = settings.get(older)
        given = size.get(newer, size.get(older)) if given is None else given
        found.append(number(default if given is None else given, older, MOST_PIXELS))
    return found[0], found[1]


@dataclass(frozen=True)
class Qwen2VLPreprocessor:
    """side: pixels a side of a token. most: tokens of a picture. shortest, longest: the fewest and
    the most pixels that a picture comes to have."""

    placeholder: str
    token: int
    side: int
    most: int
    shortest: int
    longest: int
    resample: int
    details: tuple[Detail, ...] = ("low", "high")

    def __call__(self, image: Image, detail: Detail, at: str) -> Processed:
        most = min(LOW_TOKENS, self.most) if detail == "low" else self.most
        size, longest = (image.height, image.width), min(self.longest, most * self.side**2)
        check_proportions(*size, at)
        height, width = fitted(*size, self.side, self.shortest, longest)
        tokens = height * width // self.side**2
        if tokens > self.most:
            raise InvalidValue(
                f"{at} has {image.width:,} x {image.height:,} pixels, which fill {tokens:,} "
                f"tokens; {self.most:,} at most", at,
            )  # fmt: skip
        pixels = resized(image, (height, width), self.resample, at)[None]
        return Processed(self.placeholder * tokens, (ImageInput.of(pixels, size, tokens),))


def check_proportions(height: int, width: int, at: str) -> None:
    """Raises InvalidValue for lines."""
    if max(height, width) > STEEPEST * min(height, width):
        raise InvalidValue(
            f"{at} has {width:,} x {height:,} pixels; one side is up to {STEEPEST} times as "
            "long as the other", at,
        )  # fmt: skip


def fitted(
    height: int, width: int, side: int, shortest: int, longest: int, frames: int = 1, even: int = 1
) -> Size:
    """Height and width in whole tokens of `side` pixels, with about the same proportions, and from
    `shortest` to `longest` pixels. frames: which have these pixels together, counted as `even`
    frames before they are scaled."""
    # Python rounds halves to even, as the reference does.
    down, across = round(height / side) * side, round(width / side) * side
    if even * down * across > longest:
        scale = math.sqrt(frames * height * width / longest)
        down = max(side, math.floor(height / scale / side) * side)
        across = max(side, math.floor(width / scale / side) * side)
    elif even * down * across < shortest:
        scale = math.sqrt(shortest / (frames * height * width))
        down = math.ceil(height * scale / side) * side
        across = math.ceil(width * scale / side) * side
    return down, across
