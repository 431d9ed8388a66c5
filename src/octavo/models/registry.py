"""Architecture names to families."""

from __future__ import annotations

from collections.abc import Callable

from octavo.checkpoint import Checkpoint
from octavo.errors import Unsupported
from octavo.models import (
    bert,
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt_oss,
    llama,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    opt,
    phi,
    phi3,
    qwen2,
    qwen3,
    seed_oss,
    starcoder2,
)
from octavo.program import Program

Family = Callable[[Checkpoint, int | None], Program]

# By GGUF's general.architecture and Hugging Face's model_type.
ARCHITECTURES: dict[str, Family] = {
    "llama": llama.build,
    "mistral": llama.build,
    "smollm3": llama.build,
    "mixtral": mixtral.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
    "qwen3moe": qwen3.build,
    "qwen3_moe": qwen3.build,
    "olmoe": olmoe.build,
    "olmo2": olmo2.build,
    "olmo3": olmo3.build,
    "phi": phi.build,
    "phi2": phi.build,
    "phi3": phi3.build,
    "gemma": gemma.build,
    "gemma2": gemma2.build,
    "gemma3": gemma3.build,
    "gemma3_text": gemma3.build,
    "gpt-oss": gpt_oss.build,
    "gpt_oss": gpt_oss.build,
    "gpt2": gpt2.build,
    "opt": opt.build,
    "seed_oss": seed_oss.build,
    "starcoder2": starcoder2.build,
    "bert": bert.build,
    "roberta": bert.build,
    "xlm-roberta": bert.build,
}


def build_program(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The program of a checkpoint, for sequences up to `context` tokens or the model's own limit.

    Raises Unsupported for an unknown architecture.
    """
    name = checkpoint.architecture
    if name not in ARCHITECTURES:
        key = "general.architecture" if checkpoint.format == "gguf" else "model_type"
        raise Unsupported(
            f'"{name[:40]}" models are not supported yet   ({checkpoint.path.name}, {key})',
            f"supported: {', '.join(ARCHITECTURES)}",
        )
    return ARCHITECTURES[name](checkpoint, context)
