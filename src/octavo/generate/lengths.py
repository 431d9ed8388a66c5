"""Lengths of prompts and replies against the context, checked before contents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from octavo.engine.request import SamplingParams, are_tokens, shown
from octavo.errors import ContextExceeded, InvalidValue
from octavo.generate.model import ServedModel
from octavo.generate.request import GenerationRequest, Sampling


def fitting(
    request: GenerationRequest, prompts: list[list[int]], model: ServedModel
) -> Sampling | SamplingParams:
    """The parameters, without a limit that the context does not leave room for if that is meant."""
    given = request.sampling
    if not request.to_context or not isinstance(given, Sampling) or given.max_tokens is None:
        return given
    fits = max(map(len, prompts)) + given.max_tokens <= model.context
    return given if fits else replace(given, max_tokens=None)


def check_texts(texts: Iterable[str], model: ServedModel, param: str) -> None:
    """What is too long whatever it says is not tokenized. Raises RequestError."""
    for text in texts:
        if not isinstance(text, str):
            raise InvalidValue(f"{param} holds {shown(text)}, which is no text", param)
        if (least := model.tokenizer.least_tokens(text)) > model.context:
            raise ContextExceeded(model.context, least, 0, param)


def check_length(
    prompts: list[list[int]], max_tokens: int | None, model: ServedModel, param: str
) -> None:
    """Lengths before contents: what fits the context, and ids that exist. Raises RequestError."""
    for ids in prompts:
        if not isinstance(ids, list | tuple):
            raise InvalidValue(
                f"{param} holds {shown(ids)}; texts and lists of ids are taken", param
            )
    wanted = 1 if max_tokens is None else max_tokens
    longest = max(map(len, prompts), default=0)
    if longest + wanted > model.context:
        raise ContextExceeded(model.context, longest, wanted, param)
    for ids in prompts:
        if not ids:
            raise InvalidValue("the prompt is empty", param)
        if not are_tokens(ids, model.vocabulary):
            raise InvalidValue(
                f"a prompt token is no integer, or outside 0 to {model.vocabulary - 1}", param
            )
