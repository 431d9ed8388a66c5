"""A request's body as a variant wants it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Raw

from octavo.experiments.spec import Variant


def altered(body: bytes, variant: Variant) -> bytes:
    """A JSON object with the variant's model, fields and prefix. What it does not change is not
    decoded. Raises msgspec.DecodeError for what is no object."""
    if variant == Variant(weight=variant.weight):
        return body
    fields: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Raw])
    if variant.model is not None:
        fields["model"] = variant.model
    fields |= variant.set
    if variant.prompt_prefix is not None:
        with suppress(msgspec.ValidationError):  # which the server that is asked refuses
            _put_before(fields, variant.prompt_prefix)
    return msgspec.json.encode(fields)


def _put_before(fields: dict[str, Any], prefix: str) -> None:
    """Puts a text before the prompt: before the first system message's, or as one."""
    if "messages" in fields:
        messages: list[Any] = msgspec.json.decode(fields["messages"], type=list[Any])
        first = messages[0] if messages and isinstance(messages[0], dict) else {}
        if first.get("role") in ("system", "developer") and isinstance(first.get("content"), str):
            messages[0] = first | {"content": prefix + first["content"]}
        else:
            messages.insert(0, {"role": "system", "content": prefix})
        fields["messages"] = messages
    elif bytes(fields.get("prompt", b""))[:1] == b'"':
        fields["prompt"] = prefix + msgspec.json.decode(fields["prompt"], type=str)
    elif "input" in fields:
        given = msgspec.json.decode(fields.get("instructions", b"null"), type=str | None)
        fields["instructions"] = prefix + (given or "")
