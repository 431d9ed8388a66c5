"""Architecture names to families."""

from __future__ import annotations

from collections.abc import Callable

from octavo.checkpoint import Checkpoint
from octavo.errors import Unsupported
from octavo.models import bert, gemma3, llama
from octavo.program import Program

ARCHITECTURES: dict[str, Callable[[Checkpoint], Program]] = {
    "llama": llama.build,
    "mistral": llama.build,
    "gemma3": gemma3.build,
    "gemma3_text": gemma3.build,
    "bert": bert.build,
    "roberta": bert.build,
    "xlm-roberta": bert.build,
}


def build_program(checkpoint: Checkpoint) -> Program:
    """The program of a checkpoint. Raises Unsupported for an unknown architecture."""
    name = checkpoint.architecture
    if name not in ARCHITECTURES:
        key = "general.architecture" if checkpoint.format == "gguf" else "model_type"
        raise Unsupported(
            f'"{name[:40]}" models are not supported yet   ({checkpoint.path.name}, {key})',
            f"supported: {', '.join(ARCHITECTURES)}",
        )
    return ARCHITECTURES[name](checkpoint)
