"""From a path to a model ready to plan: headers are read, weights stay on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.backends import get_backend
from octavo.backends.base import Compiled
from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.engine.draft_plan import CompiledDraft
from octavo.engine.encoder import CompiledEncoder
from octavo.errors import CheckpointError, UsageError
from octavo.models import build_program, build_vision
from octavo.models.images import Vision
from octavo.models.mmproj import AUTO, NONE, with_mmproj
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
    def mmproj(self) -> str:
        """The file with the image encoder, or "none": what opens the same model again."""
        file = self.checkpoint.mmproj
        return NONE if file is None else str(file.path)

    @property
    def vocabulary(self) -> int:
        return self.program.vocabulary

    @property
    def task(self) -> Task:
        return self.program.task


def open_model(
    path: Path, adapters: bool = False, context: int | None = None, mmproj: str = AUTO,
    vision_dtype: str = "auto", device: str = "cpu",
) -> OpenModel:  # fmt: skip
    """Reads headers only; `adapters`: whether LoRA adapters may be loaded; `context`: the longest
    sequence to come, by which models with two sets of rotations choose theirs; `mmproj`: the file
    of a GGUF model's image encoder (see `with_mmproj`); `vision_dtype`: see `CompiledEncoder.of`;
    `device`: see `get_backend`.

    Raises ModelNotFound, CheckpointError or Unsupported.
    """
    checkpoint = with_mmproj(open_checkpoint(path), mmproj)
    program = build_program(checkpoint, context)
    vision = build_vision(checkpoint)
    if vision is not None:
        _check_width(checkpoint, program, vision)
    encoder = None if vision is None else CompiledEncoder.of(vision, vision_dtype, device)
    return OpenModel(checkpoint, get_backend(device).compile(program, adapters), encoder)


def _check_width(checkpoint: Checkpoint, program: Program, vision: Vision) -> None:
    """Raises CheckpointError for an encoder whose embeddings the language model cannot take."""
    taken = [given.shape[-1] for given in program.inputs if given.name == "embeddings"]
    made = sum(projector.output.width for projector in vision.projectors)
    if taken != [made]:
        raise CheckpointError(
            f"{checkpoint.path.name}: its images make {made} features a token; its language model "
            f"takes {taken[0] if taken else 'none'}"
        )


def open_draft(path: Path, device: str = "cpu") -> CompiledDraft:
    """Reads the headers of a draft model. Raises ModelNotFound, CheckpointError, Unsupported or
    UsageError."""
    opened = open_model(path, mmproj=NONE, device=device)  # images are not shown to it
    if opened.task != "generate" or not opened.program.causal:
        raise UsageError(f"--draft {path.name} generates no text", "--draft smollm2")
    return CompiledDraft(path, opened.compiled, dict(opened.checkpoint.states))
