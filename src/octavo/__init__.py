"""Serve language models from an ordinary computer, exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.compress.evaluate import evaluate
    from octavo.compress.evaluation import Evaluation
    from octavo.compress.quantize import quantize
    from octavo.engine.request import BeamSearch, SamplingParams
    from octavo.errors import OctavoError
    from octavo.generate.reply import Completion
    from octavo.llm import LLM, AsyncLLM
    from octavo.text import grammar

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearch",
    "Completion",
    "Evaluation",
    "OctavoError",
    "SamplingParams",
    "__version__",
    "evaluate",
    "grammar",
    "quantize",
]

_HOMES = {
    "AsyncLLM": "octavo.llm",
    "LLM": "octavo.llm",
    "Completion": "octavo.generate.reply",
    "BeamSearch": "octavo.engine.request",
    "Evaluation": "octavo.compress.evaluation",
    "OctavoError": "octavo.errors",
    "SamplingParams": "octavo.engine.request",
    "evaluate": "octavo.compress.evaluate",
    "quantize": "octavo.compress.quantize",
}


def __getattr__(name: str) -> Any:
    # Lazy: `octavo --help` must not load numpy.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    if name == "grammar":
        from octavo.text import grammar

        return grammar
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
