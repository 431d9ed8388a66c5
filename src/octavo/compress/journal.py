"""What a long computation has finished, beside its output, so that it can go on where it was ended.

`OUTPUT.part/` holds `journal.json`, which says what is computed of what, and two files a step: its
arrays, and `NNNN.json`, which is there once they are whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import TensorType
from octavo.checkpoint.safetensors import read_safetensors
from octavo.checkpoint.writer import NewTensor, write_json, write_safetensors
from octavo.errors import OctavoError, WriteError

Arrays = Mapping[str, npt.NDArray[Any]]
_KINDS = {"uint8": TensorType.U8, "float32": TensorType.F32, "int32": TensorType.I32}
PIECE = 1 << 24  # bytes that are read at a time


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
    Raises WriteError.
    """

    def __init__(self, output: Path, identity: Mapping[str, str]) -> None:
        self._output, self.folder = output, output.with_name(f"{output.name}.part")
        self.differs: str | None = None
        found = _read(self.folder / "journal.json")
        if found is not None and found != dict(identity):
            same = found.get
            self.differs = ", ".join(k for k in identity if same(k) != identity[k]) or "journal"
        if found is None or self.differs:
            try:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir(parents=True)
            except OSError as e:
                raise WriteError(f"cannot write {self.folder}: {e.strerror or e}") from None
            write_json(self.folder / "journal.json", dict(identity))

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

    @property
    def made(self) -> Path:
        """Where the output is written before it is whole."""
        return self.folder / self._output.name

    def publish(self) -> None:
        """Moves what was made to the place of the output. Raises WriteError."""
        try:
            self.made.replace(self._output)
        except OSError as e:
            raise WriteError(f"cannot write {self._output}: {e.strerror or e}") from None


def _read(path: Path) -> Any:
    """A JSON document; None where there is none, or none that can be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, OctavoError):
        return None
