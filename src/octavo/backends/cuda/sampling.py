"""Draws tokens from logits on the device.

Rows that only want the likeliest token are decided there. What else there is (temperatures, limits,
masks, penalties, log-probabilities) is the CPU's sampler, to which the row is
copied: the same function of logits, parameters, seed and position as on a CPU.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo import _native
from octavo.backends.base import Sample, SamplingRow
from octavo.backends.cuda.device import operations


def likeliest(row: SamplingRow) -> bool:
    """Whether the device can draw for a row by itself."""
    return (
        row.temperature <= 0
        and row.logprobs < 0
        and row.target < 0
        and not row.adjustments
        and not row.mask
    )


class Sampler:
    """Draws from the first rows of logits `[selected, vocabulary]`."""

    def __init__(self, drawn: torch.Tensor) -> None:
        """drawn: memory for a token of each row."""
        self._best = drawn
        self._functions = operations(drawn.device)
        self._isa = _native.isas()[0]

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """The likeliest token of each row, on the device."""
        best = self._best[: len(logits)]
        self._functions.argmax(logits, None, best)
        return best

    def sample(self, logits: torch.Tensor, rows: list[SamplingRow]) -> list[Sample]:
        """A sample for each row."""
        tokens: list[int] = []
        others = [i for i, row in enumerate(rows) if not likeliest(row)]
        if len(others) < len(rows):
            tokens = self.draw(logits[: len(rows)]).tolist()
        copied = dict(zip(others, logits[others].cpu().numpy(), strict=True)) if others else {}
        return [
            self._native(np.ascontiguousarray(copied[i]), row)
            if i in copied
            else Sample(tokens[i], 0.0, [], [])
            for i, row in enumerate(rows)
        ]

    def _native(self, logits: np.ndarray, row: SamplingRow) -> Sample:
        return Sample._make(_native.sample(self._isa, logits, row))
