"""Where operations run, and which functions compute them: decided here alone."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

from octavo.backends.cuda.probe import HOST
from octavo.errors import DeviceUnusable, DoesNotFit

MIB = 1 << 20


def torch_device(number: int) -> torch.device:
    """The GPU of that number; the CPU where the backend is tested without one. Raises
    DeviceUnusable if PyTorch cannot use it."""
    if os.environ.get(HOST):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceUnusable(
            f"PyTorch {torch.__version__} cannot use the GPU: the driver is too old for CUDA "
            f"{torch.version.cuda}, or the GPU does not answer", "nvidia-smi", "--device cpu",
        )  # fmt: skip
    return torch.device("cuda", number)


def check_room(device: torch.device, needed: int) -> None:
    """Raises DoesNotFit if a GPU has less memory free than that many bytes."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if needed > free:
        raise DoesNotFit(
            f"the model takes {needed // MIB:,} MiB of the GPU's memory; {free // MIB:,} of "
            f"{total // MIB:,} MiB are free", f"--memory {free * 9 // 10 // MIB}MiB", "nvidia-smi",
        )  # fmt: skip


def operations(device: torch.device) -> ModuleType:
    """The operations as Triton's kernels, or as plain torch on the CPU."""
    found: Any
    if device.type == "cuda" or os.environ.get(HOST) == "interpreter":
        from octavo.backends.cuda import kernels

        found = kernels
    else:
        from octavo.backends.cuda import host

        found = host
    assert isinstance(found, ModuleType)
    return found


def kernels_of(device: torch.device) -> str:
    """The name of what computes there."""
    if device.type != "cuda":
        return "host"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device the one that launches go to: each thread has its own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def wait(device: torch.device) -> None:
    """Waits until everything that was launched is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
