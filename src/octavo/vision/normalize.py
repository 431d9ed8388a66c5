"""From 8-bit channels to what an encoder was trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo import _native
from octavo.checkpoint import Checkpoint
from octavo.checkpoint.files import read_json
from octavo.errors import CheckpointError
from octavo.vision.image import Pixels

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
FILES = ("processor_config.json", "preprocessor_config.json")
VIDEO_FILE = "video_preprocessor_config.json"


def processor_settings(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """How a folder's reference processor treats images. Raises CheckpointError."""
    for name in FILES:
        if (path := checkpoint.files.get(name)) is not None:
            found = read_json(path)
            found = found.get("image_processor", found)
            if isinstance(found, dict) and ("image_mean" in found or "do_normalize" in found):
                return found
    raise CheckpointError(
        f"{checkpoint.path.name}: no preprocessor_config.json says how images are prepared",
        "download the model's files again",
    )


def video_settings(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """How a folder's reference processor treats videos: as images, if it says nothing else. Raises
    CheckpointError."""
    if (path := checkpoint.files.get(FILES[0])) is not None:
        found = read_json(path).get("video_processor")
        if isinstance(found, dict):
            return found
    if (path := checkpoint.files.get(VIDEO_FILE)) is not None:
        return read_json(path)
    return processor_settings(checkpoint)


def _numbers(settings: Mapping[str, Any], key: str, name: str, count: int = 3) -> list[float]:
    values = settings.get(key)
    kinds = {type(v) for v in values} if isinstance(values, list | tuple) else {type(None)}
    if not kinds <= {int, float} or len(values or ()) != count:
        raise CheckpointError(f"{name}: {key} is {str(values)[:40]}")
    numbers = [float(v) for v in values or ()]
    if not all(map(math.isfinite, numbers)):
        raise CheckpointError(f"{name}: {key} is {str(values)[:40]}")
    return numbers


@dataclass(frozen=True)
class Normalization:
    """value * scale in fp64, then (value - mean) / std by channel in fp32, as the reference."""

    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, settings: Mapping[str, Any], name: str) -> Normalization:
        """From a preprocessor's settings. Raises CheckpointError for impossible ones."""
        scale = settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1.0
        mean, std = [0.0] * 3, [1.0] * 3
        if settings.get("do_normalize", True):
            mean, std = (_numbers(settings, key, name) for key in ("image_mean", "image_std"))
        (scale,) = _numbers({"rescale_factor": [scale]}, "rescale_factor", name, 1)
        if min(*std, scale) <= 0:
            raise CheckpointError(f"{name}: image_std is {str(std)[:40]}, rescale_factor {scale}")
        return cls(scale, tuple(mean), tuple(std))

    @property
    def table(self) -> Floats:
        """`[3, 256]`: what the bytes of each channel become."""
        values = (np.arange(256) * self.scale).astype(np.float32)
        mean, std = (np.array(v, np.float32)[:, None] for v in (self.mean, self.std))
        return (values - mean) / std

    def patches(
        self, pixels: Pixels, first: Ints, side: int, frames: int = 1, apart: int = 0
    ) -> Floats:
        """Normalized squares, `[len(first), 3 * frames * side * side]` by channel, picture, line
        and column.

        pixels: `[pictures, height, width, 3]`. first: a square's first pixel, counted by lines of
        all pictures; below zero for one of zeros. side: its pixels a side. frames: pictures that it
        is in, `apart` lines from one to the next; 0: the same again.
        """
        lines = pixels.reshape(-1, *pixels.shape[2:])
        return _native.cut_patches(lines, first, side, frames, apart, self.table)
