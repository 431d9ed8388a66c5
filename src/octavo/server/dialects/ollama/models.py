"""What Ollama's API tells of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo import __version__
from octavo.generate.model import About, ServedModel
from octavo.server.dialect import ModelCard
from octavo.server.dialects.ollama.responses import encode, rfc3339
from octavo.server.dialects.ollama.schemas import ShowBody
from octavo.text.infill import infill_tokens

FOREVER = "9999-12-31T23:59:59Z"  # of a model that is not unloaded


def version_reply() -> bytes:
    return encode({"version": __version__})


def root() -> bytes:
    """What clients look for to find a server."""
    return b"Ollama is running"


def _details(about: About, parent: str | None) -> dict[str, Any]:
    return {
        "parent_model": parent or "", "format": about.format, "family": about.architecture,
        "families": [about.architecture], "parameter_size": _shortened(about.parameters),
        "quantization_level": about.quantization,
    }  # fmt: skip


def _shortened(parameters: int) -> str:
    """A number of parameters as 1.5B or 135M."""
    for unit, letter in ((10**9, "B"), (10**6, "M")):
        if parameters >= unit:
            return f"{parameters / unit:.1f}".removesuffix(".0") + letter
    return str(parameters)


def _entry(card: ModelCard) -> dict[str, Any]:
    about = card.served.about if card.served else About()  # until it is loaded
    return {
        "name": card.name, "model": card.name, "size": about.bytes,
        "digest": "", "details": _details(about, card.parent),
    }  # fmt: skip


def tags(cards: Sequence[ModelCard]) -> bytes:
    """The models that there are."""
    listed = [_entry(card) | {"modified_at": rfc3339(card.created)} for card in cards]
    return encode({"models": listed})


def running(cards: Sequence[ModelCard]) -> bytes:
    """The models that are loaded."""
    more = {"expires_at": FOREVER, "size_vram": 0}
    listed = [
        _entry(card) | more | {"context_length": card.served.context}
        for card in cards
        if card.served is not None
    ]
    return encode({"models": listed})


def show(body: ShowBody, served: ServedModel) -> bytes:
    """All that is known of one model."""
    about, template = served.about, served.template
    able = {"generate": ["completion"], "embed": ["embedding"], "rank": []}[served.task]
    if infill_tokens(served.tokenizer) is not None and served.task == "generate":
        able.append("insert")
    if template is not None and served.task == "generate":
        able += ["tools", *(["thinking"] if template.reasons else [])]
    if served.images is not None and served.task == "generate":
        able.append("vision")
    info = {
        "general.architecture": about.architecture,
        "general.parameter_count": about.parameters,
        f"{about.architecture}.context_length": served.context,
        f"{about.architecture}.vocab_size": served.vocabulary,
    }
    defaults = served.defaults
    parameters = {
        "temperature": defaults.temperature, "top_k": defaults.top_k, "top_p": defaults.top_p,
        "min_p": defaults.min_p, "repeat_penalty": defaults.repetition_penalty,
    }  # fmt: skip
    return encode(
        {
            "modelfile": f"FROM {served.name}",
            "parameters": "\n".join(f"{k:<30} {v}" for k, v in parameters.items()),
            "template": "" if template is None else template.source,
            "details": _details(about, None), "model_info": info, "capabilities": able,
            "modified_at": rfc3339(served.created),
        }
    )  # fmt: skip
