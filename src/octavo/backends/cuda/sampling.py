"""Draws tokens from logits on the device.

Who draws for a row is decided by its parameters alone, never by what shares the step. The device
finds the likeliest token, and draws by temperature, top-k, top-p and min-p where it has the kernel.
What else there is (masks, penalties, typical-p, log-probabilities) is the CPU's sampler, to which
the row is copied: the same function of logits, parameters, seed and position as on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from octavo import _native
from octavo.backends.base import Sample, SamplingRow
from octavo.backends.cuda.device import operations

SEEDS = (1 << 64) - 1


class Draws(NamedTuple):
    """Parameters of rows on the device: fp32, int32, and int64 for what random numbers are of."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor


class Sampler:
    """Draws from the first rows of logits `[selected, vocabulary]`."""

    def __init__(self, drawn: torch.Tensor) -> None:
        """drawn: memory for a token of each row."""
        self._best = drawn
        self._functions = operations(drawn.device)
        self._draws = hasattr(self._functions, "draw")
        self._isa = _native.isas()[0]

    def here(self, row: SamplingRow) -> bool:
        """Whether the device draws for a row."""
        plain = row.logprobs < 0 and row.target < 0 and not row.adjustments and not row.mask
        return plain and (row.temperature <= 0 or (self._draws and row.typical_p >= 1))

    def parameters(self, rows: list[SamplingRow]) -> Draws | None:
        """What the device needs to draw for rows; None if it is the likeliest of all. Rows that it
        does not draw for count as such."""
        if not any(row.temperature > 0 and self.here(row) for row in rows):
            return None
        device = self._best.device
        floats = np.array(
            [(r.temperature if self.here(r) else 0, r.top_p, r.min_p) for r in rows], np.float32
        )
        seeds = np.array([(r.seed & SEEDS, r.position & SEEDS) for r in rows], np.uint64)
        top_k = torch.tensor([r.top_k for r in rows], dtype=torch.int32, device=device)
        temperature, top_p, min_p = torch.from_numpy(floats.T.copy()).to(device)
        seed, position = torch.from_numpy(seeds.T.copy().view(np.int64)).to(device)
        return Draws(temperature, top_p, min_p, top_k, seed, position)

    def draw(self, logits: torch.Tensor, draws: Draws | None) -> torch.Tensor:
        """A token of each row, on the device."""
        out = self._best[: len(logits)]
        if draws is None:
            self._functions.argmax(logits, None, out)
        else:
            self._functions.draw(logits, None, *draws, out)
        return out

    def sample(self, logits: torch.Tensor, rows: list[SamplingRow]) -> list[Sample]:
        """A sample for each row."""
        tokens: list[int] = []
        others = [i for i, row in enumerate(rows) if not self.here(row)]
        if len(others) < len(rows):
            tokens = self.draw(logits[: len(rows)], self.parameters(rows)).tolist()
        copied = dict(zip(others, logits[others].cpu().numpy(), strict=True)) if others else {}
        return [
            self._native(np.ascontiguousarray(copied[i]), row)
            if i in copied
            else Sample(tokens[i], 0.0, [], [])
            for i, row in enumerate(rows)
        ]

    def _native(self, logits: np.ndarray, row: SamplingRow) -> Sample:
        return Sample._make(_native.sample(self._isa, logits, row))
