"""Which family builds a checkpoint, by architecture."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from octavo.checkpoint import Checkpoint
from octavo.checkpoint.quantized import kv_dtype_of
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
    mmproj,
    olmo2,
    olmoe,
    opt,
    phi,
    phi3,
    qwen2,
    qwen3,
    qwen3_vl,
    seed_oss,
    starcoder2,
)
from octavo.models.defaults import DEFAULTS
from octavo.models.metadata import Recorded
from octavo.models.unread import refuse_unread
from octavo.models.wrapped import TEXT
from octavo.program import Program

Family = Callable[[Checkpoint, int | None], Program]

# By GGUF's general.architecture and Hugging Face's model_type.
ARCHITECTURES: dict[str, Family] = {
    "llama": llama.build,
    "mistral": llama.build,
    "smollm3": llama.build,
    "mixtral": mixtral.build,
    "qwen2": qwen2.build,
    "qwen2_vl_text": qwen2.build,
    "qwen2_5_vl_text": qwen2.build,
    "qwen3": qwen3.build,
    "qwen3_vl_text": qwen3_vl.build,
    "qwen3moe": qwen3.build,
    "qwen3_moe": qwen3.build,
    "olmoe": olmoe.build,
    "olmo2": olmo2.build,
    "olmo3": olmo2.build,
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

# Endings of class names in `architectures` whose heads are computed; others are refused.
DECODER_TASKS = ("CausalLM", "ConditionalGeneration")
ENCODER_TASKS = ("MaskedLM", "PreTraining", "SequenceClassification")


def _check_class(checkpoint: Checkpoint) -> None:
    encoder = ARCHITECTURES[checkpoint.architecture] is bert.build
    served = ENCODER_TASKS if encoder else DECODER_TASKS
    names = checkpoint.metadata.get("architectures")
    for name in names if isinstance(names, list) else ():
        task = re.search(r"For([A-Z]\w*)$", str(name))
        if task and task[1] not in served:
            raise Unsupported(
                f"{checkpoint.path.name}: architectures is {str(name)[:60]!r}, whose head Octavo "
                "does not compute",
                f"served: {', '.join('...For' + s for s in served)}",
            )


def build_program(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The program of a checkpoint, for sequences up to `context` tokens or the model's own limit.

    Raises Unsupported for an unknown architecture, and for an option that its family ignores.
    """
    gguf, kv_dtype = checkpoint.format == "gguf", kv_dtype_of(checkpoint.metadata)
    if not gguf and checkpoint.architecture in TEXT:
        checkpoint = TEXT[checkpoint.architecture](checkpoint)
    name = checkpoint.architecture
    if gguf and name == mmproj.ARCHITECTURE:
        raise Unsupported(
            f"{checkpoint.path.name} is the image encoder of another model: name that, and this "
            "file with --mmproj"
        )
    if name not in ARCHITECTURES or not (gguf or name in DEFAULTS):
        key = "general.architecture" if gguf else "model_type"
        raise Unsupported(
            f'"{name[:40]}" models are not supported yet   ({checkpoint.path.name}, {key})',
            f"supported: {', '.join([*ARCHITECTURES, *(TEXT.keys() - ARCHITECTURES)])}",
        )
    if not gguf:
        _check_class(checkpoint)
    metadata = Recorded(checkpoint.metadata)
    program = ARCHITECTURES[name](replace(checkpoint, metadata=metadata), context)
    refuse_unread(checkpoint, metadata)
    return replace(program, kv_dtype=kv_dtype)
