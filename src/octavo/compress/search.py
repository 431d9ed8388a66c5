"""The best mix of types for the matrices of a model within a number of bytes."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.backends.base import BLOCK, Ints
from octavo.checkpoint import Checkpoint
from octavo.checkpoint.base import TensorType, tensor_bytes
from octavo.checkpoint.hub import no_progress
from octavo.checkpoint.places import check_new_file, locked
from octavo.checkpoint.progress import ProgressBar
from octavo.checkpoint.writer import NewTensor, write_gguf
from octavo.compress.data import Part, parts, token_blocks
from octavo.compress.distributions import LOGITS, rows_at_once
from octavo.compress.evaluation import weight_bytes
from octavo.compress.sensitivity import (
    Encoded,
    Option,
    ReferenceLogits,
    made_of,
    matrices,
    opened,
    options,
    sensitivities,
    types_of,
)
from octavo.compress.writing import metadata_of
from octavo.engine.host import usable_threads
from octavo.errors import OctavoError, UsageError
from octavo.models import build_program
from octavo.text import load_tokenizer

SLOTS = 8192  # that the bytes above the smallest mix are counted in
LENGTH = 128  # tokens that each matrix is measured on
CHECKED = 16  # blocks of so many, of the other part of the text, for whole mixes
POINTS = 5  # mixes of the frontier that are measured, beside the one for the budget


@dataclass(frozen=True)
class Point:
    """A mix: bytes of its file, the KL that its matrices lose by themselves, added up, and the one
    measured. kinds: matrices by type."""

    nbytes: int
    predicted: float
    kl: float
    kinds: Mapping[str, int]


@dataclass(frozen=True)
class FoundMix:
    """The mix for a budget, written to `output`. cache: bytes of the KV cache that the budget
    holds too. frontier: measured mixes, the smallest first, the chosen one among them."""

    output: Path
    chosen: Point
    cache: int
    frontier: tuple[Point, ...]


@dataclass(frozen=True)
class Budget:
    """Bytes for a file and the KV cache of `concurrency` sequences of `context` tokens (0: the
    file alone). max_kl: the most that the model may lose."""

    nbytes: int
    context: int = 0
    concurrency: int = 1
    max_kl: float | None = None


def search(
    checkpoint: Checkpoint, budget: Budget, output: Path, *, data: Path | None = None,
    threads: int | None = None, progress: ProgressBar = no_progress,
) -> FoundMix:  # fmt: skip
    """Writes the GGUF file of a GGUF model that loses least within a budget.

    Each matrix is measured alone, on calibration text (and never again, as long as the model is the
    same); the mix is the best by their sum; it and others are measured on evaluation text. Raises
    UsageError for budgets below the smallest mix, OctavoError if the mix loses more than max_kl.
    """
    if checkpoint.format != "gguf":
        raise UsageError(f"{checkpoint.path.name} is a folder; --budget makes a GGUF file of one")
    if output.suffix != ".gguf":
        raise UsageError(f"{output} does not end with .gguf", f"--output {output}.gguf")
    if build_program(checkpoint).task != "generate":
        raise UsageError(f"{checkpoint.path.name} generates no text, so it is not measured")
    check_new_file(output)
    if not matrices(checkpoint):
        raise UsageError(f"{checkpoint.path.name} has no matrix that can become smaller")
    job = Search(checkpoint, budget, output, threads or usable_threads())
    job.check_budget()
    folder = output.with_name(f"{output.name}.search-{made_of(checkpoint)[:8]}")
    with locked(folder, output):
        try:
            found = job.run(Encoded(folder), data, progress)
        except (OctavoError, OSError):
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)  # a run that is interrupted leaves it
    return found


@dataclass(frozen=True)
class Search:
    """See `search`, which looks at the places of files as well."""

    checkpoint: Checkpoint
    budget: Budget
    output: Path
    threads: int

    @property
    def cache(self) -> int:
        """Bytes of the KV cache."""
        blocks = (self.budget.context + BLOCK - 1) // BLOCK * self.budget.concurrency
        return blocks * opened(self.checkpoint).compiled.block_bytes("bf16")

    @property
    def fixed(self) -> int:
        """Bytes of a file but for the matrices: metadata, norms, padding."""
        matrix = sum(t.nbytes for t in matrices(self.checkpoint).values())
        return weight_bytes(self.checkpoint) - matrix + 64 * len(self.checkpoint.tensors) + 4096

    def check_budget(self) -> None:
        """Raises UsageError for a budget that no mix keeps."""
        units = matrices(self.checkpoint)
        smallest = sum(tensor_bytes(types_of(t)[0], t.shape, n) for n, t in units.items())
        needed = self.fixed + smallest + self.cache
        if needed > self.budget.nbytes:
            whole, cache, given = (n / 1e6 for n in (needed, self.cache, self.budget.nbytes))
            raise UsageError(
                f"the smallest mix takes {whole:,.1f} MB, {cache:,.1f} of them for the KV cache; "
                f"the budget has {given:,.1f} MB",
                f"--budget {-(-needed // 10**6)}MB",
            )

    def run(self, encoded: Encoded, data: Path | None, progress: ProgressBar) -> FoundMix:
        model = opened(self.checkpoint)
        tokenizer, rows = load_tokenizer(self.checkpoint), rows_at_once(model.vocabulary)
        length = min(LENGTH, model.program.context)
        checked = min(CHECKED, max(1, 8 * LOGITS // (4 * model.vocabulary * length)))

        texts = parts(data, self.checkpoint.path)

        def blocks(part: Part, count: int) -> Ints:
            return token_blocks(texts[part], tokenizer, length, count)

        calibration = blocks("calibration", 1)
        units = matrices(self.checkpoint)
        with progress("Measuring matrices", len(units)) as advance:
            lost = sensitivities(self.checkpoint, calibration, rows, self.threads, advance)
        choices = {n: options(t, lost[n]) for n, t in units.items()}
        text = blocks("evaluation", checked)
        reference = ReferenceLogits.of(self.checkpoint, text, rows, self.threads)
        room = self.budget.nbytes - self.cache - self.fixed
        rooms = [*_rooms(choices), room]
        points = {}
        with progress("Measuring mixes", len(rooms)) as advance:
            for each in rooms:
                mix = best(choices, each)
                points[each] = self._point(mix, encoded, reference)
                advance(1)
        self._check(points[room], points)
        self._write(best(choices, room), encoded)
        frontier = tuple(points[each] for each in sorted(points))
        return FoundMix(self.output, points[room], self.cache, frontier)

    def _point(
        self, mix: Mapping[str, Option], encoded: Encoded, reference: ReferenceLogits
    ) -> Point:
        changed = encoded.mixed(self.checkpoint, self._changes(mix))
        kinds = Counter(o.type.name for o in mix.values())
        nbytes = self.fixed + sum(o.nbytes for o in mix.values())
        predicted = sum(o.kl for o in mix.values())
        return Point(nbytes, predicted, reference.kl(changed), dict(kinds.most_common()))

    def _changes(self, mix: Mapping[str, Option]) -> dict[str, TensorType]:
        tensors = self.checkpoint.tensors
        return {n: o.type for n, o in mix.items() if o.type is not tensors[n].type}

    def _check(self, chosen: Point, points: Mapping[int, Point]) -> None:
        most = self.budget.max_kl
        if most is None or chosen.kl <= most:
            return
        sound = [p.nbytes for p in points.values() if p.kl <= most]
        needed = (min(sound) if sound else weight_bytes(self.checkpoint)) + self.cache
        raise OctavoError(
            f"the best mix within {self.budget.nbytes / 1e6:,.1f} MB has a KL of {chosen.kl:.4g}, "
            f"above {most:g}",
            f"--budget {-(-needed // 10**6)}MB", f"--max-kl {chosen.kl * 1.05:.2g}",
        )  # fmt: skip

    def _write(self, mix: Mapping[str, Option], encoded: Encoded) -> None:
        metadata = metadata_of(self.checkpoint, GUESSED)
        tensors = encoded.mixed(self.checkpoint, self._changes(mix)).tensors
        write_gguf(
            self.output,
            metadata,
            {n: NewTensor(t.type, t.shape, t.raw) for n, t in tensors.items()},
        )


GUESSED = 1024  # llama.cpp's number for files of mixed types


def _rooms(choices: Mapping[str, list[Option]]) -> list[int]:
    """Bytes for matrices of the frontier's points, from the smallest mix to the one of the largest
    types that are smaller than the model's own."""
    low, high = (sum(options[i].nbytes for options in choices.values()) for i in (0, -2))
    return [low + (high - low) * i // POINTS for i in range(POINTS)]


def best(choices: Mapping[str, list[Option]], room: int) -> dict[str, Option]:
    """The option of each matrix with which they lose least within `room` bytes together.

    Exact but for the rounding of bytes: those above the smallest mix are counted in slots, upwards.
    Raises ValueError if not even the smallest options fit.
    """
    least = {n: min(found, key=lambda o: o.nbytes) for n, found in choices.items()}
    spare = room - sum(o.nbytes for o in least.values())
    if spare < 0:
        raise ValueError(f"the smallest options take {-spare:,} bytes more than there are")
    slot = max(1, -(-spare // SLOTS))
    slots = spare // slot
    losses = np.zeros(slots + 1)  # with at most so many slots
    picked = np.zeros((len(choices), slots + 1), np.uint8)
    for i, (name, found) in enumerate(choices.items()):
        new = np.full(slots + 1, np.inf)
        for j, option in enumerate(found):
            extra = -(-(option.nbytes - least[name].nbytes) // slot)
            if extra <= slots:
                tried = losses[: slots + 1 - extra] + option.kl
                better = tried < new[extra:]
                new[extra:][better] = tried[better]
                picked[i, extra:][better] = j
        losses = new
    mix, left = {}, slots
    for i, (name, found) in reversed(list(enumerate(choices.items()))):
        mix[name] = found[picked[i, left]]
        left -= -(-(mix[name].nbytes - least[name].nbytes) // slot)
    return mix
