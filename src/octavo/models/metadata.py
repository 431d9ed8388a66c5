"""Numbers out of metadata, checked: a file may claim anything."""

from __future__ import annotations

import math
from typing import Any

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError

LARGEST = 1 << 24  # no dimension of a real model comes near


class Metadata:
    """Reads a checkpoint's hyperparameters under a key prefix (GGUF: the architecture's)."""

    def __init__(self, checkpoint: Checkpoint, prefix: str = "") -> None:
        self._checkpoint, self._prefix = checkpoint, prefix

    def get(self, key: str) -> Any:
        return self._checkpoint.metadata.get(self._prefix + key)

    def _bad(self, key: str, value: object) -> CheckpointError:
        name = self._checkpoint.path.name
        return CheckpointError(f"{name}: {self._prefix}{key} is {str(value)[:40]}, which cannot be")

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer up to LARGEST."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
            raise self._bad(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite, positive number."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self._bad(key, value)
        return float(value)
