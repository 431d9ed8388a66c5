"""What a long computation has finished, beside its output, so that it can go on where it was ended.

`OUTPUT.journal/` holds `journal.json`, which says what is computed of what, two files a step: its
arrays, and `NNNN.json`, which is there once they are whole; and a lock, by which it is known.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import TensorType
from octavo.checkpoint.places import lock
from octavo.checkpoint.safetensors import read_safetensors
from octavo.checkpoint.writer import NewTensor, write_json, write_safetensors
from octavo.errors import OctavoError, WriteError

Arrays = Mapping[str, npt.NDArray[Any]]
_KINDS = {"uint8": TensorType.U8, "float32": TensorType.F32, "int32": TensorType.I32}
PIECE = 1 << 24  # bytes that are read at a time
LOCK = ".octavo-lock"  # in folders that are journals, held by the run that writes one


def checksum(*parts: bytes | Path) -> str:
    """SHA-256 of bytes and of files' contents, in order."""
    found = sha256()
    for part in parts:
        if isinstance(part, bytes):
            found.update(len(part).to_bytes(8, "little") + part)
            continue
        with part.open("rb") as file:
            while piece := file.read(PIECE):
                found.update(piece)
    return found.hexdigest()


class Journal:
    """The finished steps of a computation that `identity` describes, in the folder of `output`.

    What another computation has left there is removed; `differs` then says in which part it did.
    Raises WriteError, also where another run writes the same, and for a folder that is no journal.
    """

    def __init__(self, output: Path, identity: Mapping[str, str]) -> None:
        self._output, self.folder = output, output.with_name(f"{output.name}.journal")
        self.differs: str | None = None
        self._lock = self._locked()
        found = _read(self.folder / "journal.json")
        if found is not None and found != dict(identity):
            same = found.get
            self.differs = ", ".join(k for k in identity if same(k) != identity[k]) or "journal"
        try:
            anew = found is None or self.differs is not None
            self._clear([p for p in self.folder.iterdir() if anew or p == self.made])
            if anew:
                write_json(self.folder / "journal.json", dict(identity))
        except BaseException:
            self.close()
            raise

    def _locked(self) -> IO[bytes]:
        """The lock, held. Raises WriteError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / LOCK).exists() and any(self.folder.iterdir()):
                raise WriteError(
                    f"{self.folder} holds something else than what is computed for {self._output}; "
                    "move it, or name another output"
                )
            file = (self.folder / LOCK).open("ab")
        except OSError as e:
            raise WriteError(f"cannot write {self.folder}: {e.strerror or e}") from None
        try:
            lock(file.fileno(), self._output)
        except WriteError:
            file.close()
            raise
        return file

    def _clear(self, paths: list[Path]) -> None:
        """Removes some of the journal's files. Raises WriteError."""
        for path in paths:
            if path.name == LOCK:
                continue
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            except OSError as e:
                raise WriteError(f"cannot remove {path}: {e.strerror or e}") from None

    def has(self, step: int | str) -> bool:
        return self.notes(step) is not None

    def notes(self, step: int | str) -> Any:
        """What was said of a finished step; None before it is."""
        return _read(self._file(step, "json"))

    def arrays(self, step: int | str) -> Arrays:
        """The arrays of a finished step, as they lie in its file."""
        stored = read_safetensors(self._file(step, "safetensors"))
        return {name: t.array() for name, t in stored.items()}

    def save(self, step: int | str, arrays: Arrays, notes: Any) -> None:
        """Raises WriteError; the step is then not finished."""
        tensors = {
            name: NewTensor.of(np.ascontiguousarray(x), _KINDS[x.dtype.name])
            for name, x in arrays.items()
        }
        write_safetensors(self._file(step, "safetensors"), tensors)
        write_json(self._file(step, "json"), notes)

    def _file(self, step: int | str, ending: str) -> Path:
        return self.folder / f"{step if isinstance(step, str) else f'{step:04d}'}.{ending}"

    def remove(self) -> None:
        """Lets go of all steps: the computation has ended."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Lets another run go on with the steps."""
        self._lock.close()

    @property
    def made(self) -> Path:
        """Where the output is written before it is whole."""
        return self.folder / "made"

    def publish(self) -> None:
        """Moves what was made to the place of the output, if it is not there yet. Raises
        WriteError."""
        try:
            if self.made.exists():
                self.made.replace(self._output)
        except OSError as e:
            raise WriteError(f"cannot write {self._output}: {e.strerror or e}") from None


def _read(path: Path) -> Any:
    """A JSON document; None where there is none, or none that can be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, OctavoError):
        return None
