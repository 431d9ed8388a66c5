"""Which layers see a sliding window, as configurations say it."""

from __future__ import annotations

from octavo.models.decoder import Decoder


def windows(d: Decoder, default: list[int]) -> list[int]:
    """The window of each layer, 0 without one: by `layer_types`, else the default."""
    kinds = d.meta.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == d.shape.layers:
        return [0 if kind == "full_attention" else d.shape.window for kind in kinds]
    return default
