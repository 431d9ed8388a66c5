"""Responses of /v1/models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.server.dialect import ModelCard
from octavo.server.dialects.openai.responses import encode


def _card(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name, "object": "model", "created": card.created, "owned_by": "octavo",
        "max_model_len": card.served.context if card.served else None, "parent": card.parent,
        "cache_tokens": card.cache_tokens, "times": card.times, "state": card.state,
    }  # fmt: skip


def model_list(cards: Sequence[ModelCard]) -> bytes:
    """Every model, and every adapter with its model as `parent`."""
    return encode({"object": "list", "data": [_card(card) for card in cards]})


def model_card(cards: Sequence[ModelCard]) -> bytes:
    """The one model that was asked for."""
    (card,) = cards
    return encode(_card(card))
