"""A GGUF file whose layers are rounded as a folder's are: by GPTQ and its like, to Q4_0 or Q8_0."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.places import check_new_file
from octavo.checkpoint.progress import Advance
from octavo.compress.conversion import Conversion
from octavo.compress.folder_job import FolderJob
from octavo.compress.grids import Grid, Scheme
from octavo.compress.jobs import Rounded, Say
from octavo.compress.recipes import FolderRecipe
from octavo.errors import UsageError

GROUP = 32  # columns that share a scale
TYPES = {4: "Q4_0", 8: "Q8_0"}  # by bits; both have a scale and no minimum


@dataclass(frozen=True)
class GgufOfFolderJob:
    """See Job. job: makes the folder, beside the file, which holds the same values."""

    job: FolderJob
    output: Path

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, recipe: FolderRecipe, output: Path,
        texts: Callable[[], Iterable[str]] = tuple,
    ) -> GgufOfFolderJob:  # fmt: skip
        """Raises UsageError for what the blocks cannot hold, and what Conversion and FolderJob
        do."""
        if output.suffix != ".gguf":
            raise UsageError(f"{output} does not end with .gguf", f"--output {output}.gguf")
        check_new_file(output)
        if checkpoint.format == "hf":
            Conversion(checkpoint, output, "gguf")  # what has no such form is refused before
        unsaid = {"activations": recipe.activations, "what encodes images": recipe.vision,
                  "the KV cache": recipe.kv}  # fmt: skip
        for what in (name for name, said in unsaid.items() if said is not None):
            raise UsageError(f"{recipe.name}: a GGUF file says nothing of {what}")
        rules = tuple(
            rule if rule.becomes is None else replace(rule, becomes=_blocks(recipe, rule.becomes))
            for rule in recipe.rules
        )
        wanted = replace(
            recipe, weights=_blocks(recipe, recipe.weights), layouts=("compressed-tensors",),
            rules=rules,
        )  # fmt: skip
        folder = output.with_name(f".{output.name}.octavo-folder")
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off at its end
        return cls(FolderJob(checkpoint, wanted, folder, "compressed-tensors", texts), output)

    @property
    def work(self) -> int:
        return self.job.work

    def forecast(self) -> Rounded:
        return self._named(self.job.forecast())

    def run(self, progress: Advance = lambda _: None, say: Say = lambda _: None) -> Rounded:
        done = self.job.run(progress, say)
        try:
            made = Conversion(open_checkpoint(done.output), self.output, "gguf").run()
        finally:
            shutil.rmtree(done.output, ignore_errors=True)
        return replace(self._named(done), bytes_after=made.bytes_after)

    def _named(self, found: Rounded) -> Rounded:
        """What is said of the folder, of the file."""
        layers = Counter(TYPES[s.bits] for s in self.job.schemes.values() if isinstance(s, Grid))
        floats = {k: n for k, n in found.kinds.items() if k != self.job.layout}
        return replace(found, output=self.output, kinds={**layers, **floats})


def _blocks(recipe: FolderRecipe, scheme: object) -> Scheme:
    """The grid of the blocks that have as many bits. Raises UsageError."""
    if not isinstance(scheme, Grid) or scheme.bits not in TYPES:
        raise UsageError(
            f"{recipe.name} is not stored as gguf: layers of 4 or 8 bits become Q4_0 or Q8_0",
            f"--format {recipe.layouts[0]}",
        )
    return Grid(scheme.bits, GROUP)
