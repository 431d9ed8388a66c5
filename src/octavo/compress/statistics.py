"""What is known of the inputs of linear layers that share one input."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from octavo.compress.fit import F32
from octavo.errors import UsageError

MOST_SAMPLES = 1024  # rows that are kept as they are


@dataclass
class InputStatistics:
    """Sums over the inputs `[tokens, width]` that a linear layer has seen.

    gram: sum of x x^T, `[width, width]`. max_abs: the largest magnitude of each feature. samples:
    some of the rows, evenly spaced over all of them, `MOST_SAMPLES` at most; which ones depends on
    their number alone, not on how they came in pieces.
    """

    width: int
    tokens: int = 0
    gram: F32 = field(init=False)
    max_abs: F32 = field(init=False)
    samples: F32 = field(init=False)
    _sum_abs: npt.NDArray[np.float64] = field(init=False)
    _every: int = 1  # rows whose number it divides are samples

    def __post_init__(self) -> None:
        self.gram = np.zeros((self.width, self.width), np.float32)
        self.max_abs = np.zeros(self.width, np.float32)
        self.samples = np.zeros((0, self.width), np.float32)
        self._sum_abs = np.zeros(self.width, np.float64)

    def update(self, x: F32) -> None:
        """Counts some more inputs, `[rows, width]`. Raises UsageError for what is not finite."""
        if not np.isfinite(x).all():
            raise UsageError(f"inputs of a layer are not finite after {self.tokens:,} tokens")
        if not len(x):
            return
        magnitude = np.abs(x)
        self.gram += x.T @ x
        self._sum_abs += magnitude.sum(axis=0, dtype=np.float64)
        self.max_abs = np.maximum(self.max_abs, magnitude.max(axis=0))
        first = -self.tokens % self._every
        self.samples = np.concatenate([self.samples, x[first :: self._every]])
        while len(self.samples) > MOST_SAMPLES:
            self.samples = self.samples[::2].copy()
            self._every *= 2
        self.tokens += len(x)

    @property
    def mean_abs(self) -> F32:
        """The mean magnitude of each feature."""
        return (self._sum_abs / max(1, self.tokens)).astype(np.float32)

    @property
    def mean_square(self) -> F32:
        """The mean square of each feature: how much its column of weights counts (imatrix)."""
        return np.diag(self.gram) / np.float32(max(1, self.tokens))
