"""What a gateway needs beside the core: the extra `gateway`."""

from __future__ import annotations

from importlib.util import find_spec

from octavo.errors import UsageError


def check_installed() -> None:
    """Raises UsageError if the extra is not there."""
    if find_spec("aiohttp") is None:
        raise UsageError("a gateway needs aiohttp; install it: pip install 'octavo[gateway]'")
