"""Programs made executable. Backends are named here and imported when they are first used."""

from __future__ import annotations

from octavo.backends.base import Backend
from octavo.errors import UsageError


def get_backend(name: str = "cpu") -> Backend:
    """The backend of that name. Raises UsageError if there is none."""
    if name == "cpu":
        from octavo.backends.cpu.backend import CpuBackend

        return CpuBackend()
    raise UsageError(f"no backend {name[:64]!r}; there is cpu")
