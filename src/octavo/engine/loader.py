"""From a plan to an engine."""

from __future__ import annotations

from pathlib import Path

from octavo.backends.base import Executable
from octavo.checkpoint.identity import check_unchanged
from octavo.checkpoint.progress import Advance, dropping_pages
from octavo.engine.constraint import GrammarCompiler, TokenTable
from octavo.engine.cost import CostModel
from octavo.engine.draft_model import DraftModel, Languages
from octavo.engine.draft_plan import CompiledDraft, DraftPlan
from octavo.engine.drafts import ForcedRuns
from octavo.engine.engine import Engine
from octavo.engine.images import ImageQueue
from octavo.engine.lookahead import DraftWriter
from octavo.engine.open import OpenModel, open_model
from octavo.engine.plan import Plan
from octavo.engine.self_draft import SelfDraft
from octavo.engine.translation import Translation, same_tokens
from octavo.engine.tuned import read_tuned
from octavo.models.mmproj import NONE


def load_executable(model: OpenModel, plan: Plan, progress: Advance = lambda _: None) -> Executable:
    """Packs the weights into memory; the file is needed until `pack_pending` is False."""
    packed = dropping_pages(model.checkpoint, progress)
    return model.compiled.load(model.checkpoint, plan.load_options, packed)


def load_images(model: OpenModel, plan: Plan) -> ImageQueue | None:
    """The encoder of a model that takes images, with the cache that was planned; None without."""
    if model.encoder is None or not plan.image_cache:
        return None
    encoder = model.encoder.load(
        model.checkpoint, plan.threads, lambda _: model.checkpoint.drop_pages()
    )
    return ImageQueue(encoder, plan.image_cache)


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

    opened = open_model(Path(planned.path), mmproj=NONE, device=plan.device)
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
        lambda _: opened.checkpoint.drop_pages(), beside,
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
