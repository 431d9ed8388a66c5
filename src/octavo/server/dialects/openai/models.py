"""Responses of /v1/models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.generate.model import ServedModel
from octavo.server.dialects.openai.responses import encode


def _card(served: ServedModel, parent: str | None) -> dict[str, Any]:
    return {
        "id": served.name, "object": "model", "created": served.created, "owned_by": "octavo",
        "max_model_len": served.context, "parent": parent,
    }  # fmt: skip


def model_list(models: Sequence[tuple[ServedModel, str | None]]) -> bytes:
    """Every model, and every adapter with its model as `parent`."""
    return encode({"object": "list", "data": [_card(*each) for each in models]})


def model_card(models: Sequence[tuple[ServedModel, str | None]]) -> bytes:
    """The one model that was asked for."""
    (one,) = models
    return encode(_card(*one))
