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


@dataclass(frozen=True)
class Normalization:
    """value * scale in fp64, then (value - mean) / std for each channel in fp32, as the reference."""

    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, settings: Mapping[str, Any], name: str) -> Normalization:
        """From a preprocessor's settings. Raises CheckpointError for impossible ones."""
        scale = settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1.0
        mean, std = settings.get("image_mean"), settings.get("image_std")
        if not settings.get("do_normalize", True):
            mean, std = (0.0,) * 3, (1.0,) * 3
        for key, values in (("image_mean", mean), ("image_std", std), ("rescale_factor", [scale])):
            sound = isinstance(values, list | tuple) and all(
                isinstance(v, int | float) and math.isfinite(v) for v in values
            )
            if not sound or (key != "rescale_factor" and len(values) != 3):
                raise CheckpointError(f"{name}: {key} is {str(values)[:40]}")
        if not all(v > 0 for v in (*std, scale)):
            raise CheckpointError(f"{name}: image_std is {str(std)[:40]}")
        return cls(float(scale), tuple(map(float, mean)), tuple(map(float, std)))

    @property
    def table(self) -> Floats:
        """What each value of each channel becomes, `[3, 256]`."""
        value = (np.arange(256, dtype=np.float64) * self.scale).astype(np.float32)
        mean, std = (np.array(v, np.float32)[:, None] for v in (self.mean, self.std))
        return (value - mean) / std

    def __call__(self, pixels: Pixels) -> Floats:
        """`[..., 3]` as fp32."""
        table = self.table
        return np.stack([table[c][pixels[..., c]] for c in range(3)], axis=-1)
