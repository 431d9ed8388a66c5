"""Tokens on their way to the host while the device goes on."""

from __future__ import annotations

import torch


class DrawnTokens:
    """Tokens `[steps, rows]`, a row of them copied after each step."""

    def __init__(self, steps: int, rows: int, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._tokens = torch.zeros(steps, rows, dtype=torch.int32, pin_memory=self._gpu)
        self._done: list[torch.cuda.Event] = []

    def begin(self, step: int, drawn: torch.Tensor) -> None:
        """Copies what a step has drawn, once it has."""
        self._tokens[step].copy_(drawn, non_blocking=True)
        if self._gpu:
            self._done.append(torch.cuda.Event())
            self._done[step].record()

    def end(self, step: int) -> list[int]:
        """What a step has drawn, when it is here."""
        if self._gpu:
            self._done[step].synchronize()
        found: list[int] = self._tokens[step].tolist()
        return found
