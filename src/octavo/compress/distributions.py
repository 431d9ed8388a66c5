"""Two models' distributions of the next token over the same text, a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.backends.base import BLOCK, Executable, Floats, Ints, ProgramOptions, Span, StepLimits
from octavo.backends.base import StepInput as Step
from octavo.engine.host import available_memory
from octavo.engine.open import OpenModel
from octavo.engine.plan import size
from octavo.errors import DoesNotFit, OctavoError

LOGITS = 64 << 20  # bytes of logits that a model gives at a time
MOST_ROWS = 512
CHOICES = 4  # of an item: what follows in the text, and what follows elsewhere
MOST_ITEMS = 64

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Precision:
    """What a model computes with, as `make_plan` names it."""

    activations: str = "auto"
    kv_dtype: str = "auto"


WEIGHTS_ALONE = Precision("int16")  # inputs of layers lose next to nothing


@dataclass(frozen=True)
class Distances:
    """Of every token predicted, `[blocks, length - 1]`: what it cost A and B (negative
    log-probabilities), KL(B || A) of the distributions it was drawn from, and whether their
    likeliest tokens are the same. choices: log-probabilities of continuations, the text's own
    first, by A and by B, `[items, CHOICES, 2]`."""

    nll_a: Doubles
    nll_b: Doubles
    kl: Doubles
    same: npt.NDArray[np.bool_]
    choices: Doubles


class Scorer:
    """A model that gives logits of every position of one sequence, `rows` at a time."""

    def __init__(
        self, model: OpenModel, rows: int, length: int, threads: int,
        precision: Precision = WEIGHTS_ALONE,
    ) -> None:  # fmt: skip
        self.name = model.checkpoint.path.name
        self._rows = rows
        self._table = np.arange((length + BLOCK - 1) // BLOCK, dtype=np.int32)
        options = ProgramOptions(
            StepLimits(rows, rows, len(self._table)), threads,
            model.compiled.kv_dtype(precision.kv_dtype),
            activations=model.compiled.activations(precision.activations),
        )  # fmt: skip
        footprint = model.compiled.footprint(options)
        needed = footprint.total
        if needed > (available := available_memory()):
            raise DoesNotFit(
                f"{self.name} takes {size(needed)} to be measured; {size(available)} are available"
            )
        self._executable: Executable = model.compiled.load(model.checkpoint, options)

    def logits(self, ids: Ints, start: int = 0) -> Floats:
        """Logits of `ids`, at most `rows` of them, which follow `start` computed tokens."""
        count = len(ids)
        rows = np.arange(count, dtype=np.int32)
        step = Step(ids, rows + np.int32(start), [Span(0, count, start, 0)], self._table, rows)
        self._executable.step(step)
        logits = self._executable.logits(count)
        if not np.isfinite(logits).all():
            raise OctavoError(f"{self.name} computes logits that are no finite numbers")
        return logits

    def whole(self, block: Ints) -> Floats:
        """Logits of a block but for its last token."""
        starts = range(0, len(block) - 1, self._rows)
        return np.concatenate(
            [self.logits(block[i : i + self._rows][: len(block) - 1 - i], i) for i in starts]
        )


def rows_at_once(vocabulary: int) -> int:
    """Rows whose logits take about 64 MiB."""
    return max(BLOCK, min(MOST_ROWS, LOGITS // (4 * vocabulary)))


def compare(
    a: Scorer, b: Scorer, blocks: Ints, rows: int, progress: Callable[[int], Any] = lambda _: None
) -> Distances:
    """The distances of A from B over blocks of tokens `[blocks, length]`.

    progress: told of every block that is done.
    """
    count, length = blocks.shape
    nll_a, nll_b, kl = (np.zeros((count, length - 1)) for _ in range(3))
    same = np.zeros((count, length - 1), np.bool_)
    items = _items(count, length)
    choices = np.zeros((len(items), CHOICES, 2))
    for i, block in enumerate(blocks):
        for start in range(0, length - 1, rows):
            ids = block[start : min(start + rows, length - 1)]
            here = slice(start, start + len(ids))
            following = block[start + 1 : start + 1 + len(ids)]
            p, q = a.logits(ids, start), b.logits(ids, start)
            same[i, here] = p.argmax(1) == q.argmax(1)
            nll_a[i, here], nll_b[i, here], kl[i, here] = divergence(p, q, following)
        # The last ones first: a choice overwrites keys and values from its place on.
        for k, item in reversed([(k, item) for k, item in enumerate(items) if item.block == i]):
            own = slice(item.place - 1, item.place - 1 + item.length)
            choices[k, 0] = -nll_a[i, own].sum(), -nll_b[i, own].sum()
            for j, (other, place) in enumerate(item.others, 1):
                choice = blocks[other, place : place + item.length]
                ids = np.concatenate((block[item.place - 1 : item.place], choice[:-1]))
                for m, model in enumerate((a, b)):
                    x = _log_softmax(model.logits(ids, item.place - 1))
                    choices[k, j, m] = np.take_along_axis(x, choice[:, None], 1).sum()
        progress(1)
    return Distances(nll_a, nll_b, kl, same, choices)


def _log_softmax(logits: Floats) -> Doubles:
    x = logits.astype(np.float64)
    x -= x.max(1, keepdims=True)
    x -= np.log(np.exp(x).sum(1, keepdims=True))
    return x


def divergence(p: Floats, q: Floats, following: Ints) -> tuple[Doubles, Doubles, Doubles]:
    """Of rows of logits of A and B: what the tokens that follow cost each, and KL(B || A): the mean
    of q - p under B, and the difference of what both are normalised by."""
    nll_a, nll_b, kl = (np.zeros(len(p)) for _ in range(3))
    for i, token in enumerate(following):  # a row of each at a time stays in the cache
        x, y = p[i].astype(np.float64), q[i].astype(np.float64)
        weights = np.exp(y - y.max())
        total = weights.sum()
        of_x, of_y = _log_sum(x), float(y.max()) + math.log(total)
        nll_a[i], nll_b[i] = of_x - x[token], of_y - y[token]
        kl[i] = max(0.0, float(weights @ (y - x)) / total + of_x - of_y)
    return nll_a, nll_b, kl


def _log_sum(x: Doubles) -> float:
    """The logarithm of the sum of exp(x)."""
    largest = float(x.max())
    return largest + math.log(np.exp(x - largest).sum())


@dataclass(frozen=True)
class _Item:
    """A place in a block where the text's own continuation stands against those of other places,
    which are (block, place)."""

    block: int
    place: int
    length: int
    others: tuple[tuple[int, int], ...]


def _items(count: int, length: int) -> list[_Item]:
    """Two a block, up to 64, spread over the eighths of all blocks."""
    places = [(i, length * j // 8) for i in range(count) for j in range(1, 8)]
    total, number = len(places), min(MOST_ITEMS, max(2 * count, CHOICES))
    items = []
    for k in range(number):
        at = k * total // number
        others = [places[(at + j * total // CHOICES) % total] for j in range(1, CHOICES)]
        items.append(_Item(*places[at], min(16, length // 8), tuple(others)))
    return items
