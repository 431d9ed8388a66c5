"""A GGUF file of a GGUF file: tensors in other types, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from shlex import quote

import numpy as np

from octavo.checkpoint.base import FLOATS, Checkpoint, Tensor, TensorType, tensor_bytes
from octavo.checkpoint.places import check_new_file
from octavo.checkpoint.progress import Advance, dropping_pages
from octavo.checkpoint.writer import write_gguf
from octavo.compress.calibrated import Task, importance_of
from octavo.compress.calibration import check_torch
from octavo.compress.fit import F32
from octavo.compress.groups import whole
from octavo.compress.jobs import Rounded, Say, folder_name, weights_of
from octavo.compress.reading import reads
from octavo.compress.recipes import GgufRecipe, check_rules
from octavo.compress.writing import converted, metadata_of
from octavo.errors import UsageError
from octavo.models import build_program
from octavo.models.metadata import Metadata
from octavo.program import Experts, Linear, Weight


@dataclass(frozen=True)
class GgufJob:
    """See Job. data: text whose importance of columns scales are chosen by; None: without one."""

    checkpoint: Checkpoint
    recipe: GgufRecipe
    output: Path
    texts: Callable[[], Iterable[str]] | None = None

    def __post_init__(self) -> None:
        """Raises UsageError where the recipe is for models of another kind, or torch is missing;
        what `check_new_file` does."""
        if self.checkpoint.format != "gguf":
            raise UsageError(
                f"{self.recipe.name} makes GGUF files of GGUF files; "
                f"{self.checkpoint.path.name} is a folder",
                f"--recipe rtn-4 --format gptq --output {quote(str(folder_name(self.output)))}",
            )
        if self.output.suffix != ".gguf":
            raise UsageError(
                f"{self.output} does not end with .gguf", f"--output {self.output}.gguf"
            )
        check_new_file(self.output)
        if self.texts is not None:
            check_torch()
        names = {"output.weight", *self.checkpoint.tensors}  # embeddings may be the head
        check_rules(self.recipe, names)

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """The type that each tensor gets: one in blocks keeps its own where that is no larger."""
        tensors = self.checkpoint.tensors
        layers = Metadata(self.checkpoint).size("block_count", 0)
        tied = "output.weight" not in tensors
        wanted = {n: self.recipe.type_of(n, t.shape, layers, tied) for n, t in tensors.items()}

        def kept(t: Tensor, kind: TensorType) -> bool:
            return t.type not in FLOATS and t.nbytes <= tensor_bytes(kind, t.shape, t.name)

        return {n: tensors[n].type if kept(tensors[n], k) else k for n, k in wanted.items()}

    @cached_property
    def measured(self) -> dict[str, Tensor]:
        """Matrices whose inputs are looked at; of experts each by itself."""
        if self.texts is None:
            return {}
        weights: list[Weight] = []
        for op in build_program(self.checkpoint).ops:
            if isinstance(op, Linear):
                weights.append(op.weight)
            elif isinstance(op, Experts):
                weights += op.gate + op.up + op.down
        tensors = self.checkpoint.tensors
        return {(n := whole(w.tensor)[0]): tensors.get(n, w.tensor) for w in weights}

    @property
    def work(self) -> int:
        return self.checkpoint.nbytes + sum(t.nbytes for t in self.measured.values())

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.output,)

    def forecast(self) -> Rounded:
        tensors = self.checkpoint.tensors
        sizes = {n: tensor_bytes(k, tensors[n].shape, n) for n, k in self.types.items()}
        kinds = Counter(k.name for k in self.types.values())
        return Rounded(
            self.checkpoint.path, self.output, dict(kinds), weights_of(self.checkpoint),
            self.checkpoint.nbytes, sum(sizes.values()), reads=reads(self.checkpoint, sizes),
        )  # fmt: skip

    def run(self, progress: Advance = lambda _: None, say: Say = lambda _: None) -> Rounded:
        progress = dropping_pages(self.checkpoint, progress)
        if self.texts is None:
            self._write(self.output, {}, progress)
            return self.forecast()
        task = Task(self.checkpoint, self.measured, self.texts, self.recipe, self.output)
        with importance_of(task, progress, say) as (importance, made, resumed):
            self._write(made, importance, progress)
        return replace(self.forecast(), resumed=resumed)

    def _write(self, path: Path, importance: dict[str, F32], progress: Advance) -> None:
        metadata = metadata_of(self.checkpoint, self.recipe.file_type)
        tensors = {}
        for name, tensor in self.checkpoint.tensors.items():
            weights = importance.get(name)
            if weights is None and f"{name}[0]" in importance:
                weights = np.stack([importance[f"{name}[{e}]"] for e in range(tensor.shape[0])])
            tensors[name] = converted(tensor, self.types[name], progress, weights)
        write_gguf(path, metadata, tensors)
