"""The folder for what is kept between runs, and what to say when it cannot be used.

`$OCTAVO_CACHE`, else `octavo` in `$XDG_CACHE_HOME`, else in `~/.cache`, where models are also found
that were fetched before `XDG_CACHE_HOME` was set.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.errors import CacheError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cache_folders() -> list[Path]:
    """Folders to look for models in; the first gets downloads. Raises CacheError without one."""
    folders = []
    try:
        if named := os.environ.get("OCTAVO_CACHE"):
            return [Path(named).expanduser().absolute() / "models"]
        xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if xdg.is_absolute():  # the standard says to ignore others
            folders.append(xdg / "octavo" / "models")
        folders.append(Path.home() / ".cache" / "octavo" / "models")
    except RuntimeError:  # this user has no home
        if not folders:
            raise CacheError(
                "this user has no home folder to keep models in", "OCTAVO_CACHE=/tmp/octavo"
            ) from None
    return folders


def cache_folder() -> Path:
    """The folder that downloads go to."""
    return cache_folders()[0]


@contextmanager
def writing(folder: Path, variable: str = "OCTAVO_CACHE") -> Iterator[None]:
    """Creates the folder. Raises CacheError if it cannot be written to; `variable` can move it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as e:
        raise unwritable(folder, e, variable) from None


def unwritable(folder: Path, e: OSError, variable: str = "OCTAVO_CACHE") -> CacheError:
    """The error that says why a cache folder cannot be written to, and how to use another."""
    hint = f"{variable}=/tmp/octavo"
    if e.errno in _FULL:
        return CacheError(f"no space left in {folder}{_free(folder)}", "octavo models", hint)
    return CacheError(f"cannot write to {folder}: {e.strerror or e}", hint)


def need_space(folder: Path, nbytes: int, what: str, variable: str = "OCTAVO_CACHE") -> None:
    """Raises CacheError if the folder's disk has fewer free bytes than that."""
    free = _disk_free(folder)
    if free is not None and nbytes > free:
        raise CacheError(
            f"{what} needs {nbytes / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free in {folder}",
            "octavo models",
            f"{variable}=/tmp/octavo",
        )


def _disk_free(folder: Path) -> int | None:
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue  # not made yet
    return None


def _free(folder: Path) -> str:
    free = _disk_free(folder)
    return "" if free is None else f" ({free / 1e6:,.0f} MB are free)"
