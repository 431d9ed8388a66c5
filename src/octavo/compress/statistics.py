"""What is known of the inputs of linear layers that share one input."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from octavo.compress.fit import F32
from octavo.errors import UsageError

MOST_SAMPLES = 1024  # rows that are kept as they are
SPREAD = np.uint32(0x9E3779B1)  # 2^32 by the golden ratio: multiples fall evenly on any interval


@dataclass
class InputStatistics:
    """Sums over the inputs `[tokens, width]` that a linear layer has seen.

    gram: sum of x x^T, `[width, width]`. max_abs: the largest magnitude of each feature. samples:
    `MOST_SAMPLES` of the rows, in order, or all that there are; which ones depends on their number
    alone, not on how they came in pieces. They lie evenly over all rows, but in no step with
    sequences: first tokens, whose values are the largest, are no more frequent than among all.
    """

    width: int
    tokens: int = 0
    gram: F32 = field(init=False)
    max_abs: F32 = field(init=False)
    samples: F32 = field(init=False)
    _sum_abs: npt.NDArray[np.float64] = field(init=False)
    _keys: npt.NDArray[np.uint32] = field(init=False)  # of samples: rows with the least are taken

    def __post_init__(self) -> None:
        self.gram = np.zeros((self.width, self.width), np.float32)
        self.max_abs = np.zeros(self.width, np.float32)
        self.samples = np.zeros((0, self.width), np.float32)
        self._sum_abs = np.zeros(self.width, np.float64)
        self._keys = np.zeros(0, np.uint32)

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
        self._sample(x)
        self.tokens += len(x)

    def _sample(self, x: F32) -> None:
        keys = np.arange(self.tokens, self.tokens + len(x), dtype=np.uint64).astype(np.uint32)
        keys = np.concatenate([self._keys, keys * SPREAD])
        taken = np.sort(np.argsort(keys)[:MOST_SAMPLES])
        known = len(self._keys)
        old, new = taken[taken < known], taken[taken >= known] - known
        if len(new):
            self.samples = np.concatenate([self.samples[old], x[new]])
            self._keys = keys[taken]

    @property
    def mean_abs(self) -> F32:
        """The mean magnitude of each feature."""
        return (self._sum_abs / max(1, self.tokens)).astype(np.float32)

    @property
    def mean_square(self) -> F32:
        """The mean square of each feature: how much its column of weights counts (imatrix)."""
        return np.diag(self.gram) / np.float32(max(1, self.tokens))
