"""A model's image encoder, loaded: two executables, and a run that can be computed bit by bit."""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import dataclass, replace

import numpy as np

from octavo.backends import get_backend
from octavo.backends.base import (
    BLOCK,
    Compiled,
    Executable,
    Floats,
    ProgramOptions,
    Span,
    StepInput,
    StepLimits,
)
from octavo.checkpoint import Checkpoint
from octavo.checkpoint.base import TensorType
from octavo.checkpoint.progress import Advance
from octavo.models.images import Layout, Vision
from octavo.models.int8 import in_int8
from octavo.program import Linear, Program
from octavo.vision.image import ImageInput

CACHE = 64 << 20  # bytes of embeddings that are kept, unless a batch has more
BATCH_ROWS = 1024  # of patches that are encoded together, unless one image has more


class ImageEncoder:
    """Encodes images. batch: rows of the tower in a run of several images, at most."""

    def __init__(self, vision: Vision, tower: Executable, projectors: list[Executable]) -> None:
        self.vision = vision
        self.batch = min(BATCH_ROWS, tower.limits.tokens)
        self.width = sum(projector.output.width for projector in vision.projectors)
        self._tower, self._projectors = tower, projectors
        self._images: list[ImageInput] = []
        self._at = 0
        self._step: StepInput | None = None

    def bytes(self, image: ImageInput) -> int:
        """Of an image's embeddings."""
        return image.tokens * self.width * 4

    def takes(self, images: list[ImageInput]) -> bool:
        """True if one run can encode all of them."""
        lengths = [n for image in images for n in self.vision.layout(image).spans]
        blocks = sum(-(-n // BLOCK) for n in lengths)
        few = sum(lengths) <= self.batch and blocks <= self._tower.limits.blocks
        return few or len(images) == 1

    def begin(self, images: list[ImageInput]) -> None:
        """Makes images the next run's."""
        layouts = [self.vision.layout(image) for image in images]
        features = np.concatenate([self.vision.patches(image) for image in images])
        self._step = tower_step(layouts, features)
        self._images, self._at = images, 0

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
        rows = sum(self.vision.layout(image).rows for image in self._images)
        found = [self._projected(self._projectors[0], self._tower.logits(rows))]
        for tap, projector in enumerate(self._projectors[1:]):
            found.append(self._projected(projector, self._tower.tapped(tap, rows)))
        each = zip(self._images, *found, strict=True)
        return [
            self.vision.embeddings(image, np.concatenate(parts, axis=1)) for image, *parts in each
        ]

    def _projected(self, projector: Executable, states: Floats) -> list[Floats]:
        """What a projector makes of the tower's states, for each image."""
        rows = [self.vision.layout(image).rows for image in self._images]
        each = zip(self._images, _parts(states, rows), strict=True)
        merged = [self.vision.merged(image, states) for image, states in each]
        features = np.ascontiguousarray(np.concatenate(merged))
        places = np.zeros(len(features), np.int32)
        spans = [Span(i, 1, 0, 0) for i in range(len(features))]
        projector.run(_given(features, places, spans, 1), 0, projector.pauses[-1])
        return _parts(projector.logits(len(features)), [len(m) for m in merged])

    def pack_pending(self) -> bool:
        """Packs more weights. Returns True while any remain."""
        return any(each.pack_pending() for each in (self._tower, *self._projectors))


def _parts(rows: Floats, counts: list[int]) -> list[Floats]:
    """Rows one part after the other."""
    return np.split(rows, np.cumsum(counts)[:-1])


def tower_step(layouts: list[Layout], features: Floats) -> StepInput:
    """Images in a tower, one after the other."""
    spans: list[Span] = []
    first = table = 0
    for length in (length for layout in layouts for length in layout.spans):
        spans.append(Span(first, length, 0, table))
        first, table = first + length, table + -(-length // BLOCK)
    positions = np.concatenate([np.arange(span.length, dtype=np.int32) for span in spans])
    step = _given(features, positions, spans, table)
    coordinates = [layout.coordinates for layout in layouts if layout.coordinates is not None]
    segments = [layout.segments for layout in layouts if layout.segments is not None]
    return replace(
        step, coordinates=np.concatenate(coordinates, axis=1) if coordinates else None,
        segments=np.concatenate(segments) if segments else None,
    )  # fmt: skip


def _given(features: Floats, positions: np.ndarray, spans: list[Span], blocks: int) -> StepInput:
    """A step of rows that are given, of which all results are wanted."""
    rows = np.arange(len(features), dtype=np.int32)
    return StepInput(
        np.zeros(len(features), np.int32), positions, spans, np.arange(blocks, dtype=np.int32),
        rows, embeddings=features, embedding_rows=rows,
    )  # fmt: skip


@dataclass(frozen=True)
class CompiledEncoder:
    """An encoder before its weights are loaded. dtype: of the tower, as `of` was given it.
    kv_dtype: of the tower's keys and values."""

    vision: Vision
    tower: Compiled
    projectors: tuple[Compiled, ...]
    dtype: str = "auto"
    kv_dtype: str = "f32"

    @classmethod
    def of(cls, vision: Vision, dtype: str = "auto", device: str = "cpu") -> CompiledEncoder:
        """dtype: "int8" for a tower whose layers and their inputs are rounded to 8 bits, "auto" as
        it is stored. device: see `get_backend`. Raises Unsupported."""
        tower = vision.tower.program
        kv_dtype = "bf16" if device == "cpu" and _stored_in_bf16(tower) else "f32"
        tower = in_int8(tower) if dtype == "int8" else tower
        projectors = tuple(_compile(projector, device) for projector in vision.projectors)
        return cls(vision, _compile(tower, device), projectors, dtype, kv_dtype)

    @property
    def cache_bytes(self) -> int:
        """For embeddings that are kept."""
        width = sum(projector.output.width for projector in self.vision.projectors)
        return max(CACHE, 2 * self._sizes[2] * width * 4)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Rows, spans and tokens of a run: of the largest image, or of smaller ones together."""
        rows, spans, tokens = self.vision.most
        count = max(1, BATCH_ROWS // rows)
        return count * rows, count * spans, count * tokens

    def _options(self, threads: int) -> tuple[ProgramOptions, ProgramOptions]:
        """Of the tower and of each projector."""
        rows, spans, tokens = self._sizes
        limits = StepLimits(rows, rows, rows // BLOCK + spans)
        activations = self.tower.activations(self.dtype)
        return (
            ProgramOptions(
                limits, threads, self.kv_dtype, activations=activations, bf16_inputs=True
            ),
            ProgramOptions(StepLimits(tokens, tokens, 1), threads, "f32"),
        )

    def footprint(self, threads: int) -> int:
        """Bytes that it takes, loaded."""
        tower, projector = self._options(threads)
        sizes = [self.tower.footprint(tower)]
        sizes += [compiled.footprint(projector) for compiled in self.projectors]
        return sum(size.total for size in sizes)

    def load(self, checkpoint: Checkpoint, threads: int, progress: Advance) -> ImageEncoder:
        """Loads the weights; `checkpoint` is read until `pack_pending` returns False."""
        tower, projector = self._options(threads)
        loaded = self.tower.load(checkpoint, tower, progress)
        projectors = [each.load(checkpoint, projector, progress) for each in self.projectors]
        return ImageEncoder(self.vision, loaded, projectors)


def _stored_in_bf16(program: Program) -> bool:
    """True if all inputs of linear layers are rounded to bf16: so may be those of attention."""
    return all(
        op.weight.tensor.type is TensorType.BF16 for op in program.ops if isinstance(op, Linear)
    )


def _compile(program: Program, device: str) -> Compiled:
    return get_backend(device).compile(program)
