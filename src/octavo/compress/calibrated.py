"""What calibrated recipes do with each group of layers, and the models made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from octavo.backends.base import Ints
from octavo.checkpoint.base import Checkpoint, Tensor
from octavo.checkpoint.progress import Advance
from octavo.compress.calibration import Calibration, Finished, Step
from octavo.compress.data import token_blocks
from octavo.compress.fit import F32
from octavo.compress.gptq import gptq
from octavo.compress.grids import Grid, Quantized, Scheme
from octavo.compress.jobs import Loss, Say
from octavo.compress.journal import Arrays, Journal, checksum
from octavo.compress.recipes import Recipe
from octavo.compress.statistics import InputStatistics
from octavo.errors import UsageError
from octavo.models import build_program
from octavo.text.tokenizer import load_tokenizer

Steps = dict[str, int]
SEQUENCES, LENGTH = 64, 512  # of tokens that inputs are seen with


@dataclass(frozen=True)
class Made:
    """Layers that are rounded, in a journal. folded: floats that take others' place."""

    journal: Journal
    steps: Mapping[str, int]
    schemes: Mapping[str, Scheme]
    losses: tuple[Loss, ...]
    resumed: int
    folded: Mapping[str, F32]

    def quantized(self, name: str) -> Quantized:
        arrays = self.journal.arrays(self.steps[name])
        return _quantized(self.schemes[name], {p: arrays[f"{name}/{p}"] for p in _PARTS})


_PARTS = ("codes", "scales", "zeros")


def _quantized(scheme: Scheme, arrays: Arrays) -> Quantized:
    assert isinstance(scheme, Grid)
    return Quantized(scheme, arrays["codes"], arrays["scales"], arrays["zeros"])


@dataclass(frozen=True)
class Gptq:
    """Rounds each layer by GPTQ, with scales of the weights as they were."""

    schemes: Mapping[str, Scheme]

    def make(self, name: str, weights: F32, inputs: InputStatistics) -> Finished:
        grid = self.schemes[name]
        assert isinstance(grid, Grid)
        hessian = inputs.gram.astype(np.float64) / max(1, inputs.tokens)
        found = gptq(weights, hessian, grid)
        q = found.weights
        method = "rtn" if found.damping is None else "gptq"
        notes: dict[str, Any] = {"method": method, "error": found.error}
        notes["plain"] = found.plain_error
        arrays: Arrays = {"codes": q.codes, "scales": q.scales, "zeros": q.zeros}
        return Finished(arrays, notes, q.values())

    def weights(self, name: str, arrays: Arrays) -> F32:
        return _quantized(self.schemes[name], arrays).values()


class Importance:
    """Looks at inputs and changes nothing: the mean square of each feature."""

    def make(self, name: str, weights: F32, inputs: InputStatistics) -> Finished:
        return Finished({"importance": inputs.mean_square}, {})

    def weights(self, name: str, arrays: Arrays) -> None:
        return None


@dataclass(frozen=True)
class Task:
    """Layers `wanted` of a model, the text that their inputs are seen with, and what is made."""

    checkpoint: Checkpoint
    wanted: Mapping[str, Tensor]
    texts: tuple[str, ...]
    recipe: Recipe
    output: Path

    def identity(self, tokens: Ints) -> dict[str, str]:
        """What makes the result what it is, by name."""
        source = repr(self.checkpoint.metadata).encode()
        recipe = replace(self.recipe, name="", summary="")
        return {
            "version of Octavo": version("octavo"),
            "model": checksum(source, *self.checkpoint.sources),
            "recipe": checksum(repr(recipe).encode()),
            "text": checksum(tokens.tobytes()),
        }

    @contextmanager
    def done(self, step: Step, progress: Advance, say: Say) -> Iterator[tuple[Journal, Steps, int]]:
        """Goes through the layers that are left: the journal, the number that each layer has in it,
        and how many blocks were there before. The journal is let go of at the end."""
        tokenizer = load_tokenizer(self.checkpoint)
        tokens = token_blocks(list(self.texts), tokenizer, LENGTH, SEQUENCES)
        journal = Journal(self.output, self.identity(tokens))
        if journal.differs:
            say(f"what lay in {journal.folder} was of another {journal.differs}: begins anew")
        try:
            program = build_program(self.checkpoint)
            found = Calibration(self.checkpoint, program, self.wanted, tokens, step, journal)
            if found.finished:
                say(f"goes on after {len(found.finished)} of {len(found.blocks)} blocks")
            found.run(progress)
            steps = {name: i for i, block in enumerate(found.blocks) for name in block.layers}
            yield journal, steps, len(found.finished)
        except UsageError:  # it would be the same again
            journal.remove()
            raise
        journal.remove()


@contextmanager
def layers_of(
    task: Task, schemes: Mapping[str, Scheme], progress: Advance, say: Say
) -> Iterator[Made]:
    """The layers of a folder, rounded."""
    with task.done(Gptq(schemes), progress, say) as (journal, steps, resumed):
        losses = []
        for number in dict.fromkeys(steps.values()):
            losses += [Loss(name, **notes) for name, notes in journal.notes(number).items()]
        yield Made(journal, steps, schemes, tuple(losses), resumed, {})


@contextmanager
def importance_of(task: Task, progress: Advance, say: Say) -> Iterator[tuple[dict[str, F32], int]]:
    """The importance of columns of each matrix, and how many blocks were known."""
    with task.done(Importance(), progress, say) as (journal, steps, resumed):
        known = {}
        for number in dict.fromkeys(steps.values()):
            for key, x in journal.arrays(number).items():
                known[key.rpartition("/")[0]] = np.array(x)
        yield known, resumed
