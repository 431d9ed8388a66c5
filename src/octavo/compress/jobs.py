"""What a model becomes by a recipe, before and after it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.progress import Advance
from octavo.errors import UsageError

Say = Callable[[str], None]


@dataclass(frozen=True)
class Loss:
    """What a layer's outputs lose, as a share of their mean square. method: how it is rounded;
    plain: what rounding to the nearest loses."""

    name: str
    method: str
    error: float
    plain: float


@dataclass(frozen=True)
class Rounded:
    """What a model becomes. kinds: tensors by what they are stored as; weights: how many numbers;
    group: columns that share a scale, where a folder's layers have them; kept: layers left as they
    are: by the recipe, because no group divides them, or as they are stored stacked or transposed.
    dynamic: layers whose tokens have a step each, as one for all lost too much. losses: of layers
    whose inputs were seen, in order; resumed: blocks that an earlier run has made; learned: nats a
    token between the distributions of next tokens of both models, on text that was held back,
    before and after scales were learned. reads: bytes of weights that a decoded token reads, before
    and after; 0 where that is not known."""

    source: Path
    output: Path
    kinds: Mapping[str, int]
    weights: int
    bytes_before: int
    bytes_after: int
    group: int = 0
    kept: tuple[str, ...] = ()
    dynamic: tuple[str, ...] = ()
    losses: tuple[Loss, ...] = ()
    resumed: int = 0
    learned: tuple[float, float] | None = None
    reads: tuple[int, int] = (0, 0)

    @property
    def bits(self) -> float:
        """Bits a weight, scales and what is not rounded included."""
        return 8 * self.bytes_after / max(1, self.weights)


class Job(Protocol):
    """A model and a recipe that fit together: says what would come of it, and does it."""

    @property
    def work(self) -> int:
        """Bytes that `run` tells its progress by its end."""

    @property
    def files(self) -> tuple[Path, ...]:
        """What `run` makes: files, or a folder."""

    def forecast(self) -> Rounded:
        """The result without its making: sizes are exact but for headers."""

    def run(self, progress: Advance = ..., say: Say = ...) -> Rounded:
        """Writes the model. say: told what becomes of an earlier run that was cut off. Raises
        WriteError, and UsageError for weights that are no numbers."""


def check_replaced(job: Job) -> None:
    """Raises UsageError for a job that replaces a file."""
    for path in job.files:
        if path.is_file():
            raise UsageError(f"{path} is there already", "--force")


def weights_of(checkpoint: Checkpoint) -> int:
    """How many numbers a model has."""
    return sum(int(np.prod(t.shape)) for t in checkpoint.tensors.values())


def folder_name(output: Path) -> Path:
    """The name itself, or one like it that does not end as a file's does."""
    if output.suffix not in (".gguf", ".safetensors"):
        return output
    return output.with_name(f"{output.stem}-small")
