"""Serve language models from an ordinary computer, exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.engine.request import SamplingParams
    from octavo.errors import OctavoError
    from octavo.llm import LLM, Completion

__all__ = ["LLM", "Completion", "OctavoError", "SamplingParams"]

_HOMES = {
    "LLM": "octavo.llm",
    "Completion": "octavo.llm",
    "OctavoError": "octavo.errors",
    "SamplingParams": "octavo.engine.request",
}


def __getattr__(name: str) -> Any:
    # Lazy: `octavo --help` must not load numpy.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
