"""Places where results are to be written, looked at before the work that makes them."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from octavo.errors import UsageError, WriteError, WrittenByAnother


def part_of(path: Path) -> Path:
    """Where a file or folder lies while it is being written: a name that nobody else uses."""
    return path.with_name(f".{path.name}.octavo-part")


@contextmanager
def held(place: Path, output: Path, *, folder: bool = False) -> Iterator[Path]:
    """A new file or folder at `place`, of this run alone, for what becomes `output`. It is removed
    at the end, unless it was moved.

    What a run that was killed has left there goes first. Raises OSError, and WrittenByAnother.
    """
    handle = _opened(place, output, folder)
    try:
        yield place
    finally:
        with suppress(OSError):
            if _lies_at(place, handle):  # else it was moved, and the next run may have its own
                _remove(place)
        os.close(handle)


@contextmanager
def locked(folder: Path, output: Path) -> Iterator[None]:
    """Has a folder, which is made if it is not there, for this run alone. Raises WriteError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as e:
        raise WriteError(f"cannot write {folder}: {e.strerror or e}") from None
    try:
        lock(handle, output)
        yield
    finally:
        os.close(handle)


def lock(handle: int, output: Path) -> None:
    """Takes an open file or folder for this run alone, until it is closed or the process ends.
    Raises WrittenByAnother."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise WrittenByAnother(
            f"another run writes {output}; wait for it, or name another output"
        ) from None
    except OSError:  # a file system without locks
        pass


def _opened(place: Path, output: Path, folder: bool) -> int:
    """A descriptor of what was made at `place`, locked."""
    while True:
        try:
            place.mkdir() if folder else place.touch(exist_ok=False)
            new = True
        except FileExistsError:
            new = False
            if place.is_symlink():  # of nobody's run
                place.unlink(missing_ok=True)
                continue
        with suppress(FileNotFoundError):  # another run may have removed it meanwhile
            handle = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                lock(handle, output)
                if _lies_at(place, handle):
                    if new:
                        return handle
                    _remove(place)
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)


def _lies_at(place: Path, handle: int) -> bool:
    """True if a path still leads to what was opened there."""
    try:
        return os.path.samestat(os.lstat(place), os.fstat(handle))
    except FileNotFoundError:
        return False


def _remove(place: Path) -> None:
    shutil.rmtree(place) if place.is_dir() else place.unlink()


def check_new(folder: Path) -> None:
    """Raises UsageError for what is no name of a folder, WriteError for a folder that is not empty
    and one that cannot be made."""
    _check_name(folder, "folder")
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise WriteError(f"{folder} is no folder; name a new one, or remove it first")
    try:
        taken = folder.exists() and any(folder.iterdir())
    except OSError as e:
        raise WriteError(f"cannot write {folder}: {e.strerror or e}; name a new folder") from None
    if taken:
        raise WriteError(f"{folder} is not empty; name a new folder, or remove it first")
    _check_parent(folder)


def check_new_file(path: Path) -> None:
    """Raises UsageError for what is no name of a file, WriteError for a folder and a file that
    cannot be made. An older file may be there."""
    _check_name(path, "file")
    if path.is_dir():
        raise WriteError(f"{path} is a folder; name a new file")
    _check_parent(path)


def check_report(path: Path | None) -> None:
    """Raises WriteError for a file that cannot be written into a folder that is there already."""
    if path is None:
        return
    if not path.parent.exists():
        raise WriteError(f"cannot write {path}: {os.strerror(errno.ENOENT)}; make the folder first")
    check_new_file(path)


def check_outside(output: Path, model: Path) -> None:
    """Raises UsageError for an output in the model's own folder, whose files go along with it."""
    if model.is_dir() and output.resolve().is_relative_to(model.resolve()):
        beside = model.resolve().with_name(f"{model.resolve().name}-new{output.suffix}")
        raise UsageError(
            f"{output} lies in the folder of the model; name a place outside of it",
            f"--output {beside}",
        )


def _check_name(path: Path, kind: str) -> None:
    if path.name in ("", ".."):
        raise UsageError(f"{path} is no name for a new {kind}; give it one, such as model-small")


def _check_parent(path: Path) -> None:
    above = next(p for p in path.absolute().parents if os.path.lexists(p))
    code = 0
    if not above.is_dir():
        code = errno.ENOTDIR
    elif not os.access(above, os.W_OK | os.X_OK):
        code = errno.EACCES
    if code:
        raise WriteError(f"cannot write {path}: {above}: {os.strerror(code)}; name another place")
