"""Reads which layers have a sliding window."""

from __future__ import annotations

from collections.abc import Callable

from octavo.errors import CheckpointError, Unsupported
from octavo.models.decoder import Decoder


def windows(d: Decoder, default: Callable[[int], bool], used: bool = True) -> list[int]:
    """The window of each layer; 0: none.

    `layer_types` or GGUF's pattern says which layers have one, else `default`. used: False if the
    configuration turns windows off, whatever size it states. Raises CheckpointError.
    """
    size = d.window
    sliding = _pattern(d) if d.gguf else _layer_types(d)
    if sliding is None:
        sliding = [used and size > 0 and default(i) for i in range(d.config.layers)]
    if any(sliding) and not (used and size):
        raise CheckpointError(
            f"{d.checkpoint.path.name}: {d.keys['window_pattern']} wants windows, but "
            f"{d.keys['window']} is {size} and {'in' if used else 'not in'} use"
        )
    return [size if slides else 0 for slides in sliding]


def _layer_types(d: Decoder) -> list[bool] | None:
    """True for layers with a window, or None if the folder does not say."""
    key = d.keys["window_pattern"]
    kinds = d.meta.per_layer(key, d.config.layers)
    for kind in kinds or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise Unsupported(f"{d.checkpoint.path.name}: {key} has {str(kind)[:40]!r}")
    return kinds and [kind == "sliding_attention" for kind in kinds]


def _pattern(d: Decoder) -> list[bool] | None:
    """True for layers with a window, or None. GGUF has a list, or n if every n-th has none."""
    key = d.keys["window_pattern"]
    pattern, layers = d.meta.get(key), range(d.config.layers)
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        n = d.meta.size(key)
        return [i % n < n - 1 for i in layers]
    marks = d.meta.per_layer(key, len(layers))
    return marks and [bool(mark) for mark in marks]
