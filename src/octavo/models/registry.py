"""Which family builds a checkpoint, by architecture."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module

from octavo.checkpoint import Checkpoint
from octavo.checkpoint.quantized import kv_dtype_of
from octavo.errors import Unsupported
from octavo.models import mmproj
from octavo.models.defaults import DEFAULTS
from octavo.models.metadata import Recorded
from octavo.models.unread import refuse_unread
from octavo.models.wrapped import TEXT, language_model
from octavo.program import Program

# By GGUF's general.architecture and Hugging Face's model_type: modules of this package, each with a
# `build`. They are imported when a checkpoint needs them.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "smollm3": "llama",
    "mixtral": "mixtral",
    "qwen2": "qwen2",
    "qwen2vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3": "qwen3",
    "qwen3vl": "qwen3_vl",
    "qwen3_vl_text": "qwen3_vl",
    "qwen3moe": "qwen3",
    "qwen3_moe": "qwen3",
    "olmoe": "olmoe",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "phi": "phi",
    "phi2": "phi",
    "phi3": "phi3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gpt-oss": "gpt_oss",
    "gpt_oss": "gpt_oss",
    "gpt2": "gpt2",
    "opt": "opt",
    "seed_oss": "seed_oss",
    "starcoder2": "starcoder2",
    "bert": "bert",
    "roberta": "bert",
    "xlm-roberta": "bert",
}

# Endings of class names in `architectures` whose heads are computed; others are refused.
DECODER_TASKS = ("CausalLM", "ConditionalGeneration")
ENCODER_TASKS = ("MaskedLM", "PreTraining", "SequenceClassification")


def _check_class(checkpoint: Checkpoint) -> None:
    encoder = ARCHITECTURES[checkpoint.architecture] == "bert"
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
    if not gguf:
        checkpoint = language_model(checkpoint)
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
    family = import_module(f"octavo.models.{ARCHITECTURES[name]}")
    program: Program = family.build(replace(checkpoint, metadata=metadata), context)
    refuse_unread(checkpoint, metadata)
    return replace(program, kv_dtype=kv_dtype)
