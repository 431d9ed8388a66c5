"""From 8-bit channels to what an encoder was trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoint import Checkpoint
from octavo.checkpoint.files import read_json
from octavo.errors import CheckpointError
from octavo.vision.image import Pixels

Floats = npt.NDArray[np.float32]
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

    def __call__(self, pixels: Pixels) -> Floats:
        """`[..., width, 3]` as fp32."""
        lines = pixels.reshape(-1, 3 * pixels.shape[-2])
        values = np.multiply(lines, self.scale, dtype=np.float64).astype(np.float32)
        mean, std = (
            np.tile(np.array(v, np.float32), pixels.shape[-2]) for v in (self.mean, self.std)
        )
        values -= mean
        values /= std
        return values.reshape(pixels.shape)
