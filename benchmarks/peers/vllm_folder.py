"""A GGUF file's weights as vLLM reads them."""

from __future__ import annotations

from pathlib import Path


def convert(gguf: Path, folder: Path) -> None:
    """The GGUF's weights, rounded to bf16, as a checkpoint that vLLM reads."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    weights = {k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    model.config.__dict__.pop("quantization_config", None)
    model.config.dtype = "bfloat16"
    model.config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
