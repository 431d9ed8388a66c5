"""How a model's states become one vector, as sentence-transformers and GGUF files say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.safetensors import read_json
from octavo.errors import Unsupported

Vector = npt.NDArray[np.float32]
Mode = Literal["mean", "cls", "last"]
_GGUF: dict[int, Mode] = {1: "mean", 2: "cls", 3: "last"}
_MODES: dict[str, Mode] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True)
class Pooling:
    """The state to take, and whether the vector is brought to length 1."""

    mode: Mode
    normalize: bool

    def finish(self, vector: Vector) -> Vector:
        """A pooled vector as the model's users expect it."""
        return unit(vector) if self.normalize else vector


def unit(vector: Vector) -> Vector:
    """The vector at length 1; zero stays zero."""
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / np.float32(length)).astype(np.float32) if length else vector


def read_pooling(checkpoint: Checkpoint, encoder: bool) -> Pooling:
    """What the checkpoint says, else the mean (encoders) or the last state, of length 1.

    Raises Unsupported for a kind of pooling that is not built.
    """
    default: Mode = "mean" if encoder else "last"
    if checkpoint.format == "gguf":
        stored = checkpoint.metadata.get(f"{checkpoint.architecture}.pooling_type")
        return Pooling(_GGUF.get(stored, default) if isinstance(stored, int) else default, True)
    path = checkpoint.path / "1_Pooling" / "config.json"
    if not path.is_file():
        return Pooling(default, True)
    config = read_json(path)
    wanted = [k for k, v in config.items() if k.startswith("pooling_mode_") and v is True]
    if len(wanted) != 1 or wanted[0] not in _MODES:
        raise Unsupported(
            f"{checkpoint.path.name}: pooling by {', '.join(wanted)[:80] or 'nothing'}"
        )
    modules = checkpoint.path / "modules.json"
    normalize = not modules.is_file() or "Normalize" in modules.read_text("utf-8", "replace")
    return Pooling(_MODES[wanted[0]], normalize)
