"""A served model, of an open one and what computes its tokens."""

from __future__ import annotations

import time
from collections import Counter

from octavo.checkpoint import Checkpoint
from octavo.checkpoint.hub import Located
from octavo.checkpoint.pooling import read_pooling
from octavo.client.base import EngineClient
from octavo.engine.constraint import TokenTable
from octavo.engine.defaults import GenerationConfig, default_params
from octavo.engine.open import OpenModel
from octavo.generate.grammar_check import GrammarChecker
from octavo.generate.model import About, ServedModel
from octavo.models.mmproj_folder import encoder_of
from octavo.text import ChatTemplate, Tokenizer
from octavo.vision.clip import VideoPreprocessor
from octavo.vision.preprocess import Preprocessor


def token_table(tokenizer: Tokenizer) -> TokenTable:
    """What an engine is told of a vocabulary."""
    special = tokenizer.special
    return TokenTable(tokenizer.grammar_bytes(), sorted(special.control), sorted(special.eos))


def served_model(
    opened: OpenModel, located: Located, tokenizer: Tokenizer, table: TokenTable,
    template: ChatTemplate | None, client: EngineClient, context: int,
    generation_config: GenerationConfig, name: str = "",
) -> ServedModel:  # fmt: skip
    """An open model with what computes its tokens. table: of the tokenizer. name: instead of the
    model's own."""
    name = name or located.name
    return ServedModel(
        name=name,
        aliases=tuple(sorted({located.name, *located.aliases} - {name})),
        tokenizer=tokenizer,
        template=template,
        client=client,
        grammars=GrammarChecker(table, opened.vocabulary),
        defaults=default_params(opened.checkpoint, located.sampling, generation_config),
        vocabulary=opened.vocabulary,
        context=context,
        created=int(time.time()),
        task=opened.task,
        pooling=read_pooling(opened.checkpoint, not opened.program.causal),
        about=_about(opened.checkpoint),
        images=_preprocessor(opened, tokenizer),
        videos=_video_preprocessor(opened, tokenizer),
    )


def _preprocessor(opened: OpenModel, tokenizer: Tokenizer) -> Preprocessor | None:
    """How a model takes pictures, None for text only. Raises CheckpointError."""
    if (vision := opened.vision) is None:
        return None
    from octavo.vision.families import load_preprocessor  # which models of text do not need

    return load_preprocessor(
        encoder_of(opened.checkpoint), tokenizer, family=vision.family,
        placeholder=vision.placeholder, tokens=vision.tokens, size=vision.size,
    )  # fmt: skip


def _video_preprocessor(opened: OpenModel, tokenizer: Tokenizer) -> VideoPreprocessor | None:
    """How a model takes videos, None if it does not. Raises CheckpointError."""
    if (vision := opened.vision) is None or vision.video is None:
        return None
    from octavo.vision.video_families import load_video_preprocessor

    return load_video_preprocessor(
        encoder_of(opened.checkpoint), tokenizer, family=vision.family, placeholder=vision.video,
        tokens=vision.tokens, size=vision.size,
    )  # fmt: skip


def _about(checkpoint: Checkpoint) -> About:
    held: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        held[tensor.type.name] += tensor.nbytes
    return About(
        checkpoint.format,
        checkpoint.architecture,
        checkpoint.parameters,
        checkpoint.nbytes,
        held.most_common(1)[0][0],
    )
