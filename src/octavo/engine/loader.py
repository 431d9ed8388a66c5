"""From a path to a model ready to plan, and from a plan to an engine."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

from octavo.backends import get_backend
from octavo.backends.base import Compiled, Executable
from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.checkpoint.progress import Advance
from octavo.engine.constraint import GrammarCompiler, TokenTable
from octavo.engine.cost import CostModel
from octavo.engine.encoder import CompiledEncoder
from octavo.engine.engine import Engine
from octavo.engine.images import ImageQueue
from octavo.engine.plan import Plan
from octavo.models import build_program, build_vision
from octavo.models.images import Vision
from octavo.program import Program, Task


@dataclass(frozen=True)
class OpenModel:
    """A checkpoint whose program is known but whose weights are still on disk."""

    checkpoint: Checkpoint
    compiled: Compiled
    encoder: CompiledEncoder | None = None

    @property
    def program(self) -> Program:
        return self.compiled.program

    @property
    def vision(self) -> Vision | None:
        """How images become embeddings; None if the model takes none."""
        return None if self.encoder is None else self.encoder.vision

    @property
    def vocabulary(self) -> int:
        return self.program.vocabulary

    @property
    def task(self) -> Task:
        return self.program.task


def open_model(path: Path, adapters: bool = False, context: int | None = None) -> OpenModel:
    """Reads headers only; `adapters`: whether LoRA adapters may be loaded; `context`: the longest
    sequence to come, by which models with two sets of rotations choose theirs.

    Raises ModelNotFound, CheckpointError or Unsupported.
    """
    checkpoint = open_checkpoint(path)
    program = build_program(checkpoint, context)
    vision = build_vision(checkpoint)
    encoder = None if vision is None else CompiledEncoder.of(vision)
    return OpenModel(checkpoint, get_backend().compile(program, adapters), encoder)


def _drop_pages(checkpoint: Checkpoint) -> None:
    """Gives back the file pages that packing has read."""
    for file in checkpoint.maps:
        file.madvise(mmap.MADV_DONTNEED)


def load_executable(model: OpenModel, plan: Plan, progress: Advance = lambda _: None) -> Executable:
    """Packs the weights into memory; the file is needed until `pack_pending` is False."""

    def packed(count: int) -> None:
        _drop_pages(model.checkpoint)
        progress(count)

    return model.compiled.load(model.checkpoint, plan.load_options, packed)


def load_images(model: OpenModel, plan: Plan) -> ImageQueue | None:
    """The encoder of a model that takes images, with the cache that was planned; None without."""
    if model.encoder is None or not plan.image_cache:
        return None
    encoder = model.encoder.load(
        model.checkpoint, plan.threads, lambda _: _drop_pages(model.checkpoint)
    )
    return ImageQueue(encoder, plan.image_cache)


def make_engine(
    model: OpenModel, executable: Executable, plan: Plan, table: TokenTable,
    prefix_caching: bool = True,
) -> Engine:  # fmt: skip
    """An engine that never uses more than `plan`."""
    return Engine(
        executable, model.vocabulary, plan.context, frozenset(table.eos),
        prefix_caching=prefix_caching,
        grammars=GrammarCompiler(table, model.vocabulary), adapters=executable.adapters,
        images=load_images(model, plan),
        depths=CostModel() if plan.speculation == "auto" else None,
    )  # fmt: skip


def load_engine(
    model: OpenModel,
    plan: Plan,
    table: TokenTable,
    progress: Advance = lambda _: None,
) -> Engine:
    """Loads a model into an engine."""
    executable = load_executable(model, plan, progress)
    return make_engine(model, executable, plan, table)
