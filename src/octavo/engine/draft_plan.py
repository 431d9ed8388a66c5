"""A draft model before it is loaded: what it takes, and what an engine process is told of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from octavo.backends.base import Compiled, Footprint, ProgramOptions
from octavo.checkpoint.identity import FileState


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Bytes of a draft model. files: as they were when it was planned."""

    path: str
    weights: int
    buffers: int
    cache: int
    files: dict[str, FileState]

    @property
    def total(self) -> int:
        return self.weights + self.buffers + self.cache


@dataclass(frozen=True)
class CompiledDraft:
    """An open draft model."""

    path: Path
    compiled: Compiled
    files: dict[str, FileState]

    def footprint(self, options: ProgramOptions) -> Footprint:
        """What it allocates beside a target with these options, without its cache."""
        return self.compiled.footprint(self.options(options))

    def options(self, target: ProgramOptions) -> ProgramOptions:
        """How it is loaded: like the target, without adapters."""
        activations = self.compiled.activations("auto")
        return replace(target, adapter_bytes=0, activations=activations)

    def plan(self, options: ProgramOptions, size: Footprint) -> DraftPlan:
        """options: of the target, with the blocks of its cache, of which it has as many."""
        block = self.compiled.block_bytes(options.kv_dtype)
        return DraftPlan(
            str(self.path), size.weights, size.buffers, options.limits.blocks * block,
            self.files,
        )  # fmt: skip
