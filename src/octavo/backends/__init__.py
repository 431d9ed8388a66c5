"""Programs made executable. Backends are named here and imported when they are first used."""

from __future__ import annotations

from octavo.backends.base import Backend, DeviceBytes
from octavo.errors import DeviceUnusable, UsageError


def get_backend(device: str = "cpu") -> Backend:
    """The backend of a device: "cpu", or "cuda:" and the number of a GPU. Raises UsageError."""
    if device == "cpu":
        from octavo.backends.cpu.backend import CpuBackend

        return CpuBackend()
    from octavo.backends.cuda.backend import CudaBackend

    return CudaBackend(_number(device))


def resolve_device(asked: str, what_if: bool = False) -> str:
    """The device that is meant, as `get_backend` takes it: "auto" is a GPU where one can be used.

    Looks at files, metadata and the driver; imports no PyTorch. what_if: it need not be here.
    Raises UsageError for another word, DeviceUnusable for a GPU that cannot be used.
    """
    if asked == "cpu":
        return asked
    number = 0 if asked == "auto" else _number(asked)
    from octavo.backends.cuda.probe import has_driver, usable_gpu

    if asked == "auto" and not has_driver():
        return "cpu"
    try:
        if not what_if or asked == "auto":
            usable_gpu(number)
    except DeviceUnusable:
        if asked == "auto":
            return "cpu"
        raise
    return f"cuda:{number}"


def device_memory(device: str) -> DeviceBytes | None:
    """Memory of a device that has its own, 0 bytes if it is not here; None for the CPU."""
    if device == "cpu":
        return None
    from octavo.backends.cuda.probe import device_bytes

    return device_bytes(_number(device))


def describe_gpu() -> str:
    """The first GPU, or why none can be used."""
    from octavo.backends.cuda.probe import has_driver, usable_gpu

    if not has_driver():
        return "none"
    try:
        gpu = usable_gpu(0)
    except DeviceUnusable as e:
        return f"not usable: {e}"
    return f"{gpu.name}, {gpu.memory >> 30} GiB"


def _number(device: str) -> int:
    """Of the GPU that "cuda" or "cuda:1" names. Raises UsageError."""
    name, colon, number = device.partition(":")
    if name != "cuda" or (colon and not (number.isdecimal() and len(number) < 4)):
        raise UsageError(
            f"--device {device[:64]!r} is not auto, cpu, cuda or cuda:N", "--device cuda:0"
        )
    return int(number or 0)
