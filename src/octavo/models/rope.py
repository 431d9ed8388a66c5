"""Rotary frequencies: base^(-2i/d), and the two rescalings that checkpoints ask for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError, Unsupported


def frequencies(base: float, head_dim: int) -> tuple[float, ...]:
    """The `head_dim / 2` inverse frequencies, in fp32 as the field computes them."""
    exponent = np.arange(0, head_dim, 2, dtype=np.int64).astype(np.float32) / np.float32(head_dim)
    return tuple((np.float32(1.0) / np.power(np.float32(base), exponent)).tolist())


def _llama3(inverse: tuple[float, ...], scaling: dict[str, Any]) -> tuple[float, ...]:
    """Llama 3.1's rule: long wavelengths are stretched, short ones kept, those between blended."""
    factor, low, high = (
        float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor")
    )
    original = float(scaling["original_max_position_embeddings"])
    out = []
    for f in inverse:
        wavelength = 2 * math.pi / f
        smooth = (original / wavelength - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        out.append((1 - smooth) * f / factor + smooth * f)
    return tuple(out)


def scaled(inverse: tuple[float, ...], scaling: Any, name: str) -> tuple[float, ...]:
    """Applies a Hugging Face `rope_scaling`/`rope_parameters` entry. Raises Unsupported."""
    if not isinstance(scaling, dict):
        return inverse
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    try:
        if kind == "default":
            return inverse
        if kind == "linear":
            return tuple(f / float(scaling["factor"]) for f in inverse)
        if kind == "llama3":
            return _llama3(inverse, scaling)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise CheckpointError(f"{name}: the rope scaling is incomplete") from None
    raise Unsupported(f"{name}: rope scaling {str(kind)[:40]!r} is not supported")


def gguf_scaled(
    inverse: tuple[float, ...], checkpoint: Checkpoint, prefix: str
) -> tuple[float, ...]:
    """Applies a GGUF file's linear factor or its `rope_freqs.weight` divisors."""
    kind = checkpoint.metadata.get(prefix + "rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise Unsupported(
            f"{checkpoint.path.name}: rope scaling {str(kind)[:40]!r} is not supported"
        )
    factor = checkpoint.metadata.get(prefix + "rope.scaling.factor", 1.0)
    if kind == "linear" and isinstance(factor, int | float) and factor > 0:
        inverse = tuple(f / factor for f in inverse)
    if "rope_freqs.weight" in checkpoint.tensors:
        divisors = checkpoint.tensor("rope_freqs.weight", (len(inverse),)).vector()
        if not (divisors > 0).all():
            raise CheckpointError(f"{checkpoint.path.name}: rope_freqs.weight is not positive")
        inverse = tuple(f / float(d) for f, d in zip(inverse, divisors, strict=True))
    return inverse
