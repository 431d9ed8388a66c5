"""LoRA adapters merged into a model's weights: W + scale * B A, added in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.checkpoint.adapter import LowRank, read_adapter
from octavo.checkpoint.base import FLOATS, Checkpoint, TensorType, tensor_bytes
from octavo.checkpoint.places import check_new, check_outside
from octavo.checkpoint.progress import Advance, dropping_pages
from octavo.checkpoint.writer import NewTensor, write_folder
from octavo.compress.beside import beside
from octavo.compress.conversion import half_of, plain_config
from octavo.compress.counterparts import Counterpart, turned
from octavo.compress.fit import F32
from octavo.compress.folder_view import folder_parts
from octavo.compress.grids import check_finite
from octavo.compress.packing import as_floats
from octavo.compress.writing import named
from octavo.errors import UsageError
from octavo.models import build_program
from octavo.models.adapters import adapter_targets
from octavo.models.schemes import FOLDERS

Factors = Mapping[str, LowRank]


@dataclass(frozen=True, slots=True)
class Merged:
    """A model with adapters in its weights. layers: how many have changed."""

    source: Path
    output: Path
    adapters: tuple[Path, ...]
    layers: int
    nbytes: int


class Merge:
    """A model and the adapters to be merged into it; nothing is written before `run`."""

    def __init__(self, checkpoint: Checkpoint, adapters: Sequence[Path], output: Path) -> None:
        """Raises what `read_adapter` does, UsageError for an adapter of another model, and
        what `check_new` and `check_outside` do."""
        if output.suffix in (".gguf", ".safetensors"):
            raise UsageError(
                f"{output} is no name for a folder, which is what is written",
                f"--output {output.with_suffix('')}",
            )
        check_new(output)
        check_outside(output, checkpoint.path)
        self._checkpoint, self._adapters, self._output = checkpoint, tuple(adapters), output
        self._folder, self._parts = folder_parts(checkpoint)
        self._found = [_fitting(self._folder, path) for path in adapters]

    def run(self, progress: Advance = lambda _: None) -> Merged:
        """Writes the model as a folder of floats, whole or not at all: in its own type, and what is
        quantized in 16 bits. Raises WriteError, UsageError for sums that are no numbers."""
        folder, half = self._folder, half_of(self._parts)
        progress = dropping_pages(folder, progress)
        out: dict[str, NewTensor] = {}
        for part in self._parts:
            kind = part.type if part.type in FLOATS else half
            module = part.name.removesuffix(".weight")
            factors = [each[module] for each in self._found if module in each]
            read = _reader(folder, part, factors, kind, progress)
            out[part.name] = NewTensor(kind, part.shape, read)
        config = plain_config(self._checkpoint, folder, half)
        write_folder(self._output, config, out, beside(folder))
        nbytes = sum(tensor_bytes(t.type, t.shape, n) for n, t in out.items())
        layers = len({name for each in self._found for name in each})
        return Merged(self._checkpoint.path, self._output, self._adapters, layers, nbytes)


def _fitting(folder: Checkpoint, path: Path) -> Factors:
    """An adapter's factors, of layers that the model has. Raises UsageError for others."""
    factors = read_adapter(path)
    # Columns that lie in another order are put in theirs before the sum.
    targets = adapter_targets(folder, build_program(folder), permuted=True)
    for module, f in factors.items():
        if module not in targets:
            raise UsageError(
                f"{path.name} changes {module[:80]!r}, which {folder.path.name} does not have"
            )
        wanted = max(t.end for t in targets[module]), targets[module][0].inputs
        given = f.b.shape[0], f.a.shape[1]
        if given != wanted:
            raise UsageError(
                f"{path.name} is for weights of {given[0]} x {given[1]}; {module[:80]} of "
                f"{folder.path.name} has {wanted[0]} x {wanted[1]}"
            )
    return factors


def _reader(
    folder: Checkpoint, part: Counterpart, factors: Sequence[LowRank], kind: TensorType,
    progress: Advance,
) -> Callable[[], Any]:  # fmt: skip
    def read() -> Any:
        x = part.values()
        for f in factors:
            x = x + _product(folder, part, f)
        with named(part.name):
            check_finite(x, kind)
        progress(sum(t.nbytes for t in part.sources))
        return as_floats(x, kind)

    return read


def _product(folder: Checkpoint, part: Counterpart, f: LowRank) -> F32:
    """scale * B A in fp32, as the weight lies in the folder."""
    product = np.float32(f.scale) * (f.b.vector() @ f.a.vector())
    _, scheme = FOLDERS.get(folder.architecture, ("", None))
    lies = scheme is not None and turned(scheme, part.name, part.shape)
    return product.T if lies else product
