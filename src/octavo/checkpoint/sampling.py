"""The sampling parameters that a model's makers recommend, as its files name them."""

from __future__ import annotations

from typing import Any

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.files import read_json

FILE = "generation_config.json"
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def read_sampling(checkpoint: Checkpoint) -> dict[str, Any]:
    """Values by the names that requests use: of generation_config.json or `general.sampling.*`.

    `do_sample` has no say, as in vLLM, and a `top_k` of -1 is none.
    """
    if checkpoint.format == "gguf":
        prefix = "general.sampling."
        given = {ours: _plain(checkpoint.metadata.get(prefix + k)) for k, ours in _GGUF.items()}
    elif FILE in checkpoint.files:
        config = read_json(checkpoint.files[FILE])
        given = {name: config.get(name) for name in RECOMMENDED}
    else:
        given = {}
    found = {name: value for name, value in given.items() if value is not None}
    return found | {"top_k": 0} if found.get("top_k") == -1 else found


def _plain(value: Any) -> Any:
    """The shortest decimal of a 32-bit float: 0.7 instead of 0.699999988."""
    return round(value, 6) if isinstance(value, float) else value
