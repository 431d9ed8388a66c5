"""Where operations run, and which functions compute them: decided here alone."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import torch

from octavo.backends.cuda.probe import HOST


def torch_device(number: int) -> torch.device:
    """The GPU of that number; the CPU where the backend is tested without one."""
    return torch.device("cpu") if os.environ.get(HOST) else torch.device("cuda", number)


def operations(device: torch.device) -> ModuleType:
    """The operations as Triton's kernels, or as plain torch on the CPU."""
    if device.type == "cuda" or os.environ.get(HOST) == "interpreter":
        from octavo.backends.cuda import kernels

        found: Any = kernels
        return found  # type: ignore[no-any-return]
    from octavo.backends.cuda import host

    return host


def wait(device: torch.device) -> None:
    """Waits until everything that was launched is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
