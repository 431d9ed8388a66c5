"""From a path to a model ready to plan, and from a plan to an engine."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

from octavo.backends import get_backend
from octavo.backends.base import Compiled, Executable
from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.checkpoint.identity import check_unchanged
from octavo.checkpoint.progress import Advance
from octavo.engine.constraint import GrammarCompiler, TokenTable
from octavo.engine.cost import CostModel
from octavo.engine.draft_model import DraftModel, Languages
from octavo.engine.draft_plan import CompiledDraft, DraftPlan
from octavo.engine.drafts import ForcedRuns
from octavo.engine.encoder import CompiledEncoder
from octavo.engine.engine import Engine
from octavo.engine.images import ImageQueue
from octavo.engine.lookahead import DraftWriter
from octavo.engine.plan import Plan
from octavo.engine.self_draft import SelfDraft
from octavo.engine.translation import Translation, same_tokens
from octavo.engine.tuned import read_tuned
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
    vision_dtype: str = "auto",
) -> OpenModel:  # fmt: skip
    """Reads headers only; `adapters`: whether LoRA adapters may be loaded; `context`: the longest
    sequence to come, by which models with two sets of rotations choose theirs; `mmproj`: the file
    of a GGUF model's image encoder (see `with_mmproj`); `vision_dtype`: see `CompiledEncoder.of`.

    Raises ModelNotFound, CheckpointError or Unsupported.
    """
    checkpoint = with_mmproj(open_checkpoint(path), mmproj)
    program = build_program(checkpoint, context)
    vision = build_vision(checkpoint)
    if vision is not None:
        _check_width(checkpoint, program, vision)
    encoder = None if vision is None else CompiledEncoder.of(vision, vision_dtype)
    return OpenModel(checkpoint, get_backend().compile(program, adapters), encoder)


def _check_width(checkpoint: Checkpoint, program: Program, vision: Vision) -> None:
    """Raises CheckpointError for an encoder whose embeddings the language model cannot take."""
    taken = [given.shape[-1] for given in program.inputs if given.name == "embeddings"]
    made = sum(projector.output.width for projector in vision.projectors)
    if taken != [made]:
        raise CheckpointError(
            f"{checkpoint.path.name}: its images make {made} features a token; its language model "
            f"takes {taken[0] if taken else 'none'}"
        )


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


def open_draft(path: Path) -> CompiledDraft:
    """Reads the headers of a draft model. Raises ModelNotFound, CheckpointError, Unsupported or
    UsageError."""
    opened = open_model(path, mmproj=NONE)  # images are not shown to it
    if opened.task != "generate" or not opened.program.causal:
        raise UsageError(f"--draft {path.name} generates no text", "--draft smollm2")
    return CompiledDraft(path, opened.compiled, dict(opened.checkpoint.states))


def load_writer(
    model: OpenModel, executable: Executable, plan: Plan, table: TokenTable
) -> DraftWriter | None:
    """What writes drafts for a model: another that was planned, or itself; None without.

    table: the model's tokens. Raises UsageError where it is not known what to leave out.
    """
    if plan.speculation == "self":
        return SelfDraft(executable, read_tuned(model.checkpoint, executable.parts).skip)
    return None if plan.draft is None else _load_draft(model, executable, plan, plan.draft, table)


def _load_draft(
    target: OpenModel, beside: Executable, plan: Plan, planned: DraftPlan, table: TokenTable
) -> DraftModel:
    from octavo.text import load_tokenizer  # engines know tokens, and need no tokenizer else

    opened = open_model(Path(planned.path), mmproj=NONE)
    check_unchanged(planned.files)
    draft = CompiledDraft(opened.checkpoint.path, opened.compiled, planned.files)
    tokenizer = load_tokenizer(opened.checkpoint)
    special = tokenizer.special
    own = TokenTable(tokenizer.grammar_bytes(), sorted(special.control), sorted(special.eos))
    languages = None
    if not same_tokens(table, own) or opened.vocabulary < len(table.tokens):
        first = [special.bos] if special.add_bos and special.bos is not None else []
        languages = Languages(Translation(table, own), Translation(own, table), first)
    executable = opened.compiled.load(
        opened.checkpoint, draft.options(plan.load_options),
        lambda _: _drop_pages(opened.checkpoint), beside,
    )  # fmt: skip
    return DraftModel(executable, target.vocabulary, opened.program.context, languages)


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
        depths=None if plan.speculation == "off" else CostModel(),
        sources=[ForcedRuns()] if plan.speculation in ("draft", "self") else None,
        writer=load_writer(model, executable, plan, table),
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
