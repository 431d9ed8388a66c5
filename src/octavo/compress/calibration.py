"""Rounds a model block by block over calibration tokens.

The layers of a group are rounded knowing their inputs, which were computed with the weights that
groups before them were rounded to (true-sequential). Of weights no more than a block's are in
memory, of values those that later operations read. What is finished goes into a journal; a run
that continues it computes the same values, so that it makes the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from octavo.checkpoint import Checkpoint, Tensor
from octavo.checkpoint.dequantize import dequantize
from octavo.checkpoint.progress import Advance
from octavo.compress.fit import F32
from octavo.compress.groups import Block, Group, blocks, whole
from octavo.compress.journal import Arrays, Journal
from octavo.compress.statistics import InputStatistics
from octavo.compress.writing import named
from octavo.errors import UsageError, WriteError
from octavo.program import Linear, Program

Notes = dict[str, Any]


@dataclass(frozen=True)
class FinishedLayer:
    """A layer that is done: arrays to keep, what is to be said of it, and the weights that later
    inputs are computed with (None: as they were)."""

    arrays: Arrays
    notes: Notes
    weights: F32 | None = None


class LayerStep(Protocol):
    """What is done with layers."""

    def make(self, layers: Mapping[str, F32], inputs: InputStatistics) -> dict[str, FinishedLayer]:
        """Looks at layers `[outputs, inputs]` that share an input. Raises UsageError for weights it
        cannot take."""

    def weights(self, name: str, arrays: Arrays) -> F32 | None:
        """Those of `FinishedLayer`, from its arrays."""


class Calibration:
    """A model, the layers of it that are `wanted`, and tokens `[sequences, length]`."""

    def __init__(
        self, checkpoint: Checkpoint, program: Program, wanted: Mapping[str, Tensor],
        tokens: npt.NDArray[np.int32], step: LayerStep, journal: Journal,
    ) -> None:  # fmt: skip
        """Torch is there: see `check_torch`."""
        self.checkpoint, self.wanted, self.step, self.journal = checkpoint, wanted, step, journal
        self.blocks = blocks(program, set(wanted))
        self._last = {  # operation that uses a layer; weights of experts stay until a block ends
            whole(op.weight.tensor)[0]: i
            for i, op in enumerate(program.ops)
            if isinstance(op, Linear)
        }
        self.tokens = tokens
        from octavo.backends.torch.spans import Spans

        self._spans = Spans(program, tokens, journal.folder, self._read)
        self.finished = {i for i in range(len(self.blocks)) if journal.has(i)}
        self._changed: dict[str, F32] = {}

    def run(self, progress: Advance) -> None:
        """Does the blocks that are not finished, telling `progress` the bytes of each. Raises
        WriteError, and UsageError for values that are no numbers."""
        left = [i for i in range(len(self.blocks)) if i not in self.finished]
        try:
            for i, block in enumerate(self.blocks[: max(left, default=-1) + 1]):
                if i in left:
                    at = self._make(i, block)
                else:
                    at = block.begin
                    for name, arrays in of_layers(self.journal.arrays(i)).items():
                        self._change(name, self.step.weights(name, arrays))
                if i < max(left):
                    self._spans.run(at, block.end)
                self._changed.clear()
                self.checkpoint.drop_pages()
                progress(sum(self.wanted[n].nbytes for n in block.layers))
        except OSError as e:
            raise WriteError(f"cannot write {self.journal.folder}: {e.strerror or e}") from None
        finally:
            self._spans.close()

    def _make(self, number: int, block: Block) -> int:
        """Does the groups of a block; the operation before which values are known then."""
        at, kept, notes = block.begin, dict[str, npt.NDArray[Any]](), dict[str, Notes]()
        for group in block.groups:
            if group.at > at:
                self._spans.run(at, group.at)
                at = group.at
                self.checkpoint.drop_pages()
                self._forget(at)
            inputs = self._inputs(group)
            layers = {name: self._weights(name) for name in group.layers}
            for name, done in self.step.make(layers, inputs).items():
                self._change(name, done.weights)
                kept |= {f"{name}/{part}": x for part, x in done.arrays.items()}
                notes[name] = done.notes
        self.journal.save(number, kept, notes)
        return at

    def _forget(self, at: int) -> None:
        """Lets go of weights that no operation from `at` on uses."""
        for name in [n for n in self._changed if self._last.get(n, at) < at]:
            del self._changed[name]

    def _weights(self, name: str) -> F32:
        return dequantize(self.checkpoint.tensors.get(name, self.wanted[name]))

    def _inputs(self, group: Group) -> InputStatistics:
        if group.routed is None:
            found = self._spans.inputs(group.input)
        else:
            found = self._spans.expert_inputs(*group.routed, inner=group.inner)
        out = InputStatistics(self.wanted[group.layers[0]].shape[1])
        with named(group.layers[0]):
            for x in found:
                out.update(x)
        return out

    def _change(self, name: str, weights: F32 | None) -> None:
        if weights is not None:
            self._changed[name] = weights

    def _read(self, tensor: Tensor) -> F32:
        name, rows = whole(tensor)
        return self._changed[name][rows] if name in self._changed else dequantize(tensor)


def check_torch() -> None:
    """Raises UsageError without torch, which everything here computes with."""
    try:
        import_module("octavo.backends.torch.spans")
    except ImportError:
        raise UsageError(
            "what a model's layers see is computed with torch, which is not installed",
            "pip install 'octavo[compress]'",
        ) from None


def of_layers(arrays: Arrays) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """The arrays of a block by layer."""
    out: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for key, x in arrays.items():
        name, _, part = key.rpartition("/")
        out.setdefault(name, {})[part] = x
    return out
