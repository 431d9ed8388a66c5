"""Reads hyperparameters, checking types and ranges, and records which keys were read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError
from octavo.models.defaults import DEFAULTS

LARGEST = 1 << 24  # more than any size of a real model


class Recorded(Mapping[str, Any]):
    """A mapping that records which keys were read, in nested mappings too."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {k: Recorded(v) if isinstance(v, Mapping) else v for k, v in values.items()}
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        self._read.add(key)
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yields the dotted path and the value of each key that was not read."""
        for key, value in self._values.items():
            if key not in self._read:
                yield key, value
            elif isinstance(value, Recorded):
                yield from ((f"{key}.{inner}", v) for inner, v in value.unread())


class Metadata:
    """A checkpoint's hyperparameters. Keys of GGUF files are prefixed with the architecture; keys
    missing from config.json have the default of transformers."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        gguf = checkpoint.format == "gguf"
        self._values, self._name = checkpoint.metadata, checkpoint.path.name
        self._prefix = f"{checkpoint.architecture}." if gguf else ""
        self._defaults: Mapping[str, Any] = {} if gguf else DEFAULTS[checkpoint.architecture]

    def get(self, key: str) -> Any:
        full = self._prefix + key
        return self._values[full] if full in self._values else self._defaults.get(key)

    def knows(self, key: str) -> bool:
        """True if transformers' configuration class has this key."""
        return key in self._defaults

    def bad(self, key: str, value: object) -> CheckpointError:
        full = self._prefix + key
        return CheckpointError(f"{self._name}: {full} is {str(value)[:40]}, which cannot be")

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer up to LARGEST."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
            raise self.bad(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite, positive number."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(key, value)
        if not math.isfinite(value) or value <= 0:
            raise self.bad(key, value)
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; null is false."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(key, value)
        return value

    def per_layer(self, key: str, layers: int) -> list[Any] | None:
        """A list with an entry for each layer, or None if the key is missing."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != layers:
            raise self.bad(key, value)
        return value
