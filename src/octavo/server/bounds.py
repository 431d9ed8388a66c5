"""Bounds of fields as the OpenAPI document has them.

They are for the annotations of bodies. What is outside is refused after decoding, by what uses the
field, whose message says more than a decoder's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from msgspec import Meta

from octavo.engine.request import POSITIVE, RANGES


def within(low: float, high: float) -> Meta:
    """A number from `low` to `high`."""
    return Meta(extra_json_schema={"minimum": low, "maximum": high})


def sampling(name: str) -> Meta:
    """A number that `SamplingParams.check` takes for the field `name`."""
    _, low, high = RANGES[name]
    lowest = "exclusiveMinimum" if name in POSITIVE else "minimum"
    return Meta(extra_json_schema={lowest: low, "maximum": high})


def one_of(values: Collection[Any]) -> Meta:
    """One of some values, or null."""
    return Meta(extra_json_schema={"enum": [*values, None]})


def entries(low: int, high: int) -> Meta:
    """A list of `low` to `high` entries."""
    return Meta(extra_json_schema={"minItems": low, "maxItems": high})
