"""A model's image encoder, loaded: two executables, and a run that can be computed bit by bit."""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from octavo.backends import get_backend
from octavo.backends.base import (
    BLOCK,
    Compiled,
    Executable,
    Floats,
    Limits,
    LoadOptions,
    Span,
    StepInput,
)
from octavo.checkpoint import Checkpoint
from octavo.checkpoint.progress import Advance
from octavo.models.int8 import in_int8
from octavo.models.vision import VisionModel
from octavo.program import Program
from octavo.vision.image import ImageInput

CACHE = 64 << 20  # bytes of embeddings that are kept, unless a batch has more
BATCH_ROWS = 1024  # of patches that are encoded together, unless one image has more


class ImageEncoder:
    """Encodes images. bytes: of the embeddings of one; batch: images of a run, at most."""

    def __init__(self, vision: VisionModel, tower: Executable, projector: Executable) -> None:
        self.vision = vision
        self.batch = projector.limits.tokens // vision.tokens
        self.bytes = vision.tokens * vision.width * 4
        self._tower, self._projector = tower, projector
        self._count = self._at = 0
        self._step: StepInput | None = None

    def begin(self, images: list[ImageInput]) -> None:
        """Makes images the next run's."""
        rows = self.vision.rows
        blocks = -(-rows // BLOCK)
        spans = [Span(i * rows, rows, 0, i * blocks) for i in range(len(images))]
        features = np.concatenate([self.vision.patches(image) for image in images])
        positions = np.tile(np.arange(rows, dtype=np.int32), len(images))
        self._step = _given(features, positions, spans, len(images) * blocks)
        self._count, self._at = len(images), 0

    def stop(self) -> None:
        """Forgets the run that has begun."""
        self._step = None

    def run(self, seconds: float) -> list[Floats] | None:
        """Computes for about so long. Gives the embeddings `[tokens, width]` of each image once all
        is done. After an error the run has to begin again."""
        assert self._step is not None
        until = time.perf_counter() + seconds
        pauses = self._tower.pauses
        for end in pauses[bisect_right(pauses, self._at) :]:
            self._tower.run(self._step, self._at, end)
            self._at = end
            if end < pauses[-1] and time.perf_counter() >= until:
                return None
        self._step = None
        states = self._tower.logits(self._count * self.vision.rows)
        each = np.split(states, self._count)
        features = np.ascontiguousarray(np.concatenate([self.vision.merged(s) for s in each]))
        places = np.zeros(len(features), np.int32)
        spans = [Span(i, 1, 0, 0) for i in range(len(features))]
        self._projector.run(_given(features, places, spans, 1), 0, self._projector.pauses[-1])
        return [f.copy() for f in np.split(self._projector.logits(len(features)), self._count)]

    def pack_pending(self) -> bool:
        """Packs more weights. Returns True while any remain."""
        return self._tower.pack_pending() or self._projector.pack_pending()


def _given(features: Floats, positions: np.ndarray, spans: list[Span], blocks: int) -> StepInput:
    """A step of rows that are given, of which all results are wanted."""
    rows = np.arange(len(features), dtype=np.int32)
    return StepInput(
        np.zeros(len(features), np.int32), positions, spans, np.arange(blocks, dtype=np.int32),
        rows, embeddings=features, embedding_rows=rows,
    )  # fmt: skip


@dataclass(frozen=True)
class CompiledEncoder:
    """An encoder before its weights are loaded. dtype: of the tower, as `of` was given it."""

    vision: VisionModel
    tower: Compiled
    projector: Compiled
    dtype: str = "auto"

    @classmethod
    def of(cls, vision: VisionModel, dtype: str = "auto") -> CompiledEncoder:
        """dtype: "int8" for a tower whose layers and their inputs are rounded to 8 bits, "auto" as
        it is stored. Raises Unsupported."""
        tower = vision.tower.program
        tower = in_int8(tower) if dtype == "int8" else tower
        return cls(vision, _compile(tower), _compile(vision.projector), dtype)

    @property
    def cache_bytes(self) -> int:
        """For embeddings that are kept."""
        batch = max(1, BATCH_ROWS // self.vision.rows)
        return max(CACHE, 2 * batch * self.vision.tokens * self.vision.width * 4)

    def _options(self, threads: int) -> tuple[LoadOptions, LoadOptions]:
        """Of tower and projector."""
        rows, tokens = self.vision.rows, self.vision.tokens
        batch = max(1, BATCH_ROWS // rows)
        blocks = batch * -(-rows // BLOCK)
        activations = self.tower.activations(self.dtype)
        return (
            LoadOptions(
                Limits(batch * rows, batch * rows, blocks), threads, "f32", activations=activations
            ),
            LoadOptions(Limits(batch * tokens, batch * tokens, 1), threads, "f32"),
        )

    def footprint(self, threads: int) -> int:
        """Bytes that it takes, loaded."""
        pairs = zip((self.tower, self.projector), self._options(threads), strict=True)
        sizes = [compiled.footprint(options) for compiled, options in pairs]
        return sum(size.weights + size.buffers + size.cache for size in sizes)

    def load(self, checkpoint: Checkpoint, threads: int, progress: Advance) -> ImageEncoder:
        """Loads the weights; `checkpoint` is read until `pack_pending` returns False."""
        tower, projector = self._options(threads)
        return ImageEncoder(
            self.vision, self.tower.load(checkpoint, tower, progress),
            self.projector.load(checkpoint, projector, progress),
        )  # fmt: skip


def _compile(program: Program) -> Compiled:
    return get_backend().compile(program)
