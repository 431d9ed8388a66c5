"""Models made with data: what layers see is looked at, and what is finished kept in a journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from octavo import __version__
from octavo.backends.base import Ints
from octavo.checkpoint.base import Checkpoint, Tensor
from octavo.checkpoint.progress import Advance
from octavo.compress.calibration import Calibration, LayerStep, check_torch, of_layers
from octavo.compress.data import token_blocks
from octavo.compress.fit import F32
from octavo.compress.grids import Grid, Quantized, Scheme
from octavo.compress.healing import replace_scales
from octavo.compress.jobs import Loss, Say
from octavo.compress.journal import Journal, checksum
from octavo.compress.recipes import FolderRecipe, Recipe
from octavo.compress.steps import Importance, RoundLayers, Search, search_of
from octavo.errors import UsageError
from octavo.models import build_program
from octavo.text.tokenizer import load_tokenizer

SEQUENCES, LENGTH = 64, 512  # of tokens that inputs are seen with
SEARCH_WITH = 16  # sequences at most, evenly spaced, that scales of inputs are searched with
LEARN_FROM = 8  # sequences at least that scales are learned with; half of so few judge
SCALES, LEARNED = "scales", "learned"  # of inputs and of weights, in the journal


@dataclass(frozen=True)
class Made:
    """Layers that are rounded. checkpoint: with the floats that belong to them; layer: a matrix,
    and the step of its inputs if that is fixed; output: where the model is to be written first;
    kept: layers that turned out to lose too much; dynamic: those whose tokens have a step each,
    though the recipe would have one for all."""

    output: Path
    checkpoint: Checkpoint
    layer: Callable[[str], tuple[Quantized, float | None]]
    losses: tuple[Loss, ...]
    resumed: int
    kept: frozenset[str]
    dynamic: frozenset[str]
    learned: tuple[float, float] | None = None  # see Rounded


@dataclass(frozen=True)
class Task:
    """Layers `wanted` of a model, the text that their inputs are seen with, and what is made.

    texts: asked for once all else is checked, as a model may have to write them."""

    checkpoint: Checkpoint
    wanted: Mapping[str, Tensor]
    texts: Callable[[], Iterable[str]]
    recipe: Recipe
    output: Path

    def identity(self, tokens: Ints) -> dict[str, str]:
        """What makes the result what it is, by name."""
        source = repr(self.checkpoint.metadata).encode()
        recipe = replace(self.recipe, name="", summary="")
        return {
            "version of Octavo": __version__,
            "model": checksum(source, *self.checkpoint.sources),
            "recipe": checksum(repr(recipe).encode()),
            "text": checksum(tokens.tobytes()),
        }

    @contextmanager
    def done(
        self, step: LayerStep, progress: Advance, say: Say, search: Search | None = None
    ) -> Iterator[tuple[Calibration, Journal]]:
        """Goes through the layers that are left. search: finds scales to fold into the model first.
        The journal is let go of at the end."""
        check_torch()  # before there is a journal
        tokenizer = load_tokenizer(self.checkpoint)
        length = min(LENGTH, build_program(self.checkpoint).context)
        distilled = isinstance(self.recipe, FolderRecipe) and self.recipe.method == "distilled"
        least = min(LEARN_FROM, SEQUENCES) if distilled else 1
        tokens = token_blocks(list(self.texts()), tokenizer, length, SEQUENCES, least)
        say(f"layers see {tokens.size:,} tokens of text")
        journal = Journal(self.output, self.identity(tokens))
        if journal.differs:
            say(f"what lay in {journal.folder} was of another {journal.differs}: begins anew")
        try:
            checkpoint = self._folded(tokens, journal, search, progress)
            program = build_program(checkpoint)
            found = Calibration(checkpoint, program, self.wanted, tokens, step, journal)
            if found.finished:
                say(f"goes on after {len(found.finished)} of {len(found.blocks)} blocks")
            found.run(progress)
            yield found, journal
            journal.publish()
        except UsageError:  # it would be the same again
            journal.remove()
            raise
        else:
            journal.remove()
        finally:
            journal.close()

    def _folded(
        self, tokens: Ints, journal: Journal, search: Search | None, progress: Advance
    ) -> Checkpoint:
        """The model with scales of inputs folded in, which are found first."""
        if search is None:
            return self.checkpoint
        from octavo.compress.scaled import find_scales, folded

        program = build_program(self.checkpoint)
        if not journal.has(SCALES):
            some = tokens[:: -(-len(tokens) // SEARCH_WITH)]
            found = find_scales(program, self.wanted, some, journal.folder, search, progress)
            journal.save(SCALES, {str(i): s for i, s in found.items()}, {})
        scales = {int(i): np.array(s) for i, s in journal.arrays(SCALES).items()}
        return folded(self.checkpoint, program, self.wanted, scales)


@contextmanager
def layers_of(
    task: Task, schemes: Mapping[str, Scheme], progress: Advance, say: Say
) -> Iterator[Made]:
    """The layers of a folder, rounded."""
    recipe = task.recipe
    assert isinstance(recipe, FolderRecipe) and isinstance(recipe.weights, Grid)
    step = RoundLayers(schemes, recipe.method, recipe.activations)
    group = min((s.group for s in schemes.values() if isinstance(s, Grid)), default=0)
    search = search_of(recipe.method, replace(recipe.weights, group=group), recipe.activations)
    with task.done(step, progress, say, search) as (found, journal):
        at = {name: i for i, block in enumerate(found.blocks) for name in block.layers}
        losses = [
            Loss(name, **notes)
            for i in range(len(found.blocks))
            for name, notes in journal.notes(i).items()
            if notes
        ]

        def rounded(name: str) -> tuple[Quantized, float | None]:
            arrays = of_layers(journal.arrays(at[name]))[name]
            return step.quantized(name, arrays), next(iter(arrays["step"].tolist()), None)

        layer, gained = rounded, None
        if recipe.method == "distilled":
            learned = _learned(found, journal, {n: rounded(n)[0] for n in schemes}, progress)

            notes = journal.notes(LEARNED)
            gained = notes["before"], notes["after"]

            def layer(name: str) -> tuple[Quantized, float | None]:
                return replace_scales(rounded(name)[0], learned[name]), None

        arrays = [of_layers(journal.arrays(i)) for i in range(len(found.blocks))]
        fixed = {name: bool(parts["step"].size) for each in arrays for name, parts in each.items()}
        kept, static = frozenset(schemes.keys() - fixed), recipe.activations == "static"
        dynamic = frozenset(n for n in fixed if static and not fixed[n])
        resumed = len(found.finished)
        yield Made(
            journal.made, found.checkpoint, layer, tuple(losses), resumed, kept, dynamic, gained
        )


def _learned(
    found: Calibration, journal: Journal, weights: Mapping[str, Quantized], progress: Advance
) -> Mapping[str, F32]:
    """The scales of layers, learned with the tokens that they were rounded with."""
    if not journal.has(LEARNED):
        from octavo.compress.torch.distill import distill

        program, texts = build_program(found.checkpoint), found.tokens.tolist()
        each = sum(found.wanted[n].nbytes for n in weights) // len(texts)
        done = distill(program, weights, texts, told=lambda *_: progress(each))
        scales = {name: q.scales for name, q in done.weights.items()}
        journal.save(LEARNED, scales, {"before": done.before, "after": done.after})
    return journal.arrays(LEARNED)


@contextmanager
def importance_of(
    task: Task, progress: Advance, say: Say
) -> Iterator[tuple[dict[str, F32], Path, int]]:
    """The importance of columns of each matrix, where the model is to be written first, and how
    many blocks were known."""
    with task.done(Importance(), progress, say) as (found, journal):
        known: dict[str, F32] = {}
        for i in range(len(found.blocks)):
            for name, arrays in of_layers(journal.arrays(i)).items():
                known[name] = np.array(arrays["importance"])
        yield known, journal.made, len(found.finished)
