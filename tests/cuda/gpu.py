"""Where these tests compute: without a GPU, or on one with `OCTAVO_TEST_GPU=1 pytest tests/cuda`."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.backends.cuda.probe import HOST

GPU = bool(os.environ.get("OCTAVO_TEST_GPU"))
DEVICE = "cuda" if GPU else "cpu"


def on_host(patch: pytest.MonkeyPatch) -> None:
    """Computes by the host's operations, where no GPU is asked for."""
    if not GPU:
        patch.setenv(HOST, "torch")


def interpreted(patch: pytest.MonkeyPatch) -> None:
    """Computes by kernels in Triton's interpreter, where no GPU is asked for."""
    if not GPU:
        patch.setenv(HOST, "interpreter")


def moved(arg: Any, device: str, found: dict[int, Any]) -> Any:
    """An argument with copies of its tensors on a device: as they lie in memory, shared alike."""
    if isinstance(arg, Tensor):
        own = arg.untyped_storage()
        if own.data_ptr() not in found:
            here = own.device.type == device
            found[own.data_ptr()] = (own.clone() if here else own.to(device=device), own)
        copied = found[own.data_ptr()][0]
        empty = torch.empty(0, dtype=arg.dtype, device=device)
        return empty.set_(copied, arg.storage_offset(), arg.shape, arg.stride())
    if isinstance(arg, tuple):
        parts = [moved(each, device, found) for each in arg]
        return type(arg)(*parts) if hasattr(arg, "_fields") else tuple(parts)
    return arg


def launched(function: Callable[..., None]) -> Callable[..., None]:
    """A kernel that takes tensors of the CPU and leaves in them what it leaves on a GPU."""

    def run(*args: Any, **named: Any) -> None:
        found: dict[int, Any] = {}
        function(*moved(args, "cuda", found), **named)
        for copied, own in found.values():
            own.copy_(copied)

    return run


def find_kernels() -> Any:
    """The kernels, as they are called with tensors of the CPU."""
    from octavo.backends.cuda import kernels

    if not GPU:
        return kernels
    return SimpleNamespace(**{n: launched(getattr(kernels, n)) for n in kernels.__all__})
