"""Which GPU there is, found out without importing torch: by files, metadata and the driver."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import NamedTuple

from octavo.backends.base import DeviceBytes
from octavo.errors import DeviceUnusable

INSTALL = 'pip install "octavo[cuda]"'
OLDEST_TORCH = (2, 11)
OLDEST_CAPABILITY = (8, 0)  # which has bf16
CONTROL = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # of Linux, and of WSL
_MAJOR, _MINOR = 75, 76  # attributes of the driver's API


class Gpu(NamedTuple):
    """A GPU as the driver numbers it. memory: bytes. capability: of compute, such as (9, 0)."""

    number: int
    name: str
    memory: int
    capability: tuple[int, int]


HOST = "OCTAVO_CUDA_HOST"  # "torch" or "interpreter": the backend on a CPU, for tests
PROCESS = 768 << 20  # estimated: the driver's context, kernels and graphs; not yet measured


def device_bytes(number: int) -> DeviceBytes | None:
    """Memory of a GPU, 0 if there is none here; None where the backend is tested on a CPU."""
    if os.environ.get(HOST):
        return None
    try:
        total = find_gpu(number).memory
    except DeviceUnusable:
        total = 0
    return DeviceBytes(total, PROCESS)


def has_driver() -> bool:
    """Whether the driver's files are there: a GPU may answer."""
    return any(path.exists() for path in CONTROL)


def installed(package: str) -> str | None:
    """The version of an installed package; None if there is none."""
    from importlib.metadata import PackageNotFoundError, version  # 10 ms that CPUs need not take

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_torch() -> None:
    """Raises DeviceUnusable unless a PyTorch that drives GPUs is installed; imports none."""
    found = installed("torch")
    if found is None:
        raise DeviceUnusable("computing on a GPU takes PyTorch, which is missing", INSTALL)
    if tuple(int(n) for n in re.findall(r"\d+", found)[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise DeviceUnusable(f"PyTorch {found} is too old for this: {oldest} or later", INSTALL)
    if "+cpu" in found or installed("triton") is None:
        raise DeviceUnusable(f"PyTorch {found} is built without CUDA", INSTALL)


def find_gpu(number: int, library: str = "libcuda.so.1") -> Gpu:
    """The GPU of that number, as `CUDA_VISIBLE_DEVICES` leaves them. Raises DeviceUnusable."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        raise DeviceUnusable(
            "there is no NVIDIA driver here (libcuda.so.1)", "--device cpu"
        ) from None
    if (code := driver.cuInit(0)) != 0:
        what = "finds no GPU" if code == 100 else f"does not start (error {code})"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        more = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"
        raise DeviceUnusable(f"the NVIDIA driver {what}{more}", "--device cpu")
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    if number >= count.value:
        raise DeviceUnusable(
            f"there is no GPU {number}: the driver has {count.value}",
            f"--device cuda:{count.value - 1}" if count.value else "--device cpu",
        )
    return _described(driver, number)


def _described(driver: ctypes.CDLL, number: int) -> Gpu:
    handle, memory = ctypes.c_int(), ctypes.c_size_t()
    major, minor = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(128)
    driver.cuDeviceGet(ctypes.byref(handle), number)
    driver.cuDeviceGetName(name, len(name), handle)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
    driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, handle)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, handle)
    gpu = Gpu(number, name.value.decode(), memory.value, (major.value, minor.value))
    if gpu.capability < OLDEST_CAPABILITY:
        raise DeviceUnusable(
            f"{gpu.name} has compute capability {major.value}.{minor.value}; kernels take "
            f"{OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} or later", "--device cpu",
        )  # fmt: skip
    return gpu


def usable_gpu(number: int) -> Gpu:
    """The GPU of that number, if PyTorch can use it. Raises DeviceUnusable."""
    if os.environ.get(HOST):
        return Gpu(number, "host", 0, OLDEST_CAPABILITY)
    check_torch()
    return find_gpu(number)
