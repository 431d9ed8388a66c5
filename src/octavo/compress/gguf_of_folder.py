"""A GGUF file whose layers are rounded as a folder's are: by GPTQ and its like, to Q4_0 or Q8_0."""

from __future__ import annotations

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
    """See Job. job: makes a folder that holds the same values, and the file of it. mmproj: the file
    with the image encoder."""

    job: FolderJob
    mmproj: Path | None

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
        mmproj = Conversion(checkpoint, output, "gguf").mmproj  # what has no such form is refused
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

        def finish(folder: Path) -> int:
            return Conversion(open_checkpoint(folder), output, "gguf").run().bytes_after

        layout = wanted.layouts[0]
        return cls(FolderJob(checkpoint, wanted, output, layout, texts, finish=finish), mmproj)

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.job.output,) if self.mmproj is None else (self.job.output, self.mmproj)

    @property
    def work(self) -> int:
        return self.job.work

    def forecast(self) -> Rounded:
        return self._named(self.job.forecast())

    def run(self, progress: Advance = lambda _: None, say: Say = lambda _: None) -> Rounded:
        return self._named(self.job.run(progress, say))

    def _named(self, found: Rounded) -> Rounded:
        """What is said of the folder, of the file."""
        layers = Counter(TYPES[s.bits] for s in self.job.schemes.values() if isinstance(s, Grid))
        floats = {k: n for k, n in found.kinds.items() if k != self.job.layout}
        return replace(found, kinds={**layers, **floats})


def _blocks(recipe: FolderRecipe, scheme: object) -> Scheme:
    """The grid of the blocks that have as many bits. Raises UsageError."""
    if not isinstance(scheme, Grid) or scheme.bits not in TYPES:
        raise UsageError(
            f"{recipe.name} is not stored as gguf: layers of 4 or 8 bits become Q4_0 or Q8_0",
            f"--format {recipe.layouts[0]}",
        )
    return Grid(scheme.bits, GROUP)
