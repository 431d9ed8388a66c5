"""Reads the parameters of rotary embeddings from folders and GGUF files."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError
from octavo.models.metadata import Metadata
from octavo.models.rope import Rotation, Scaling, scaled

LARGEST_BASE = 1e30  # its powers are computed in fp32
# Parameters of any rescaling. All count as read: transformers ignores those of other methods.
PARAMETERS = (
    "rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor",
    "long_factor", "low_freq_factor", "high_freq_factor", "finetuned",
)  # fmt: skip
TURNING = ("qwen3vl",)  # architectures of GGUF whose axes take turns
GGUF_PARAMETERS = {
    "factor": "rope.scaling.factor", "attention_factor": "rope.scaling.attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow",
}  # fmt: skip


def _width(head_dim: int, factor: object, name: str) -> int:
    """Features of a head that are rotated. factor: a share of them, or None for all."""
    width = int(head_dim * factor) if isinstance(factor, int | float) else head_dim
    if not 2 <= width <= head_dim or width % 2:
        raise CheckpointError(f"{name}: {width} of {head_dim} features cannot be rotated")
    return width


def _axes(parameters: Mapping[str, Any], pairs: int, name: str) -> tuple[int, ...]:
    """The axis of each pair of a rotation along three axes (m-RoPE), `mrope_section` pairs of each:
    one axis after the other, or taking turns. Without sections: none."""
    sections, turns = parameters.get("mrope_section"), parameters.get("mrope_interleaved")
    if sections is None:
        return ()
    kinds = [type(n) for n in sections] if isinstance(sections, list) else []
    if kinds != [int] * 3 or min(sections) < 0 or sum(sections) != pairs:
        raise CheckpointError(
            f"{name}: mrope_section is {str(sections)[:40]}, for {pairs} pairs of a head"
        )
    if turns:
        own = ((i % 3, sections[i % 3]) for i in range(pairs))
        return tuple(axis if i < 3 * count else 0 for i, (axis, count) in enumerate(own))
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def hf_parameters(m: Metadata, kind: str | None) -> Mapping[str, Any]:
    """The rotary parameters in config.json for layers of `kind`, or for all.

    If kinds differ, transformers 5 has them in `rope_parameters` by kind; before, `rope_scaling`
    was for layers with full attention.
    """
    scaling, parameters = m.get("rope_scaling") or {}, m.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping) or not isinstance(parameters, Mapping):
        raise m.bad("rope_scaling" if parameters else "rope_parameters", scaling or parameters)
    if kind is None:
        return scaling or parameters  # the first of the two is what transformers takes
    own = parameters.get(kind) or {}
    if not isinstance(own, Mapping):
        raise m.bad(f"rope_parameters.{kind}", own)
    if not scaling or kind != "full_attention":
        return own
    return ChainMap(scaling, own)  # type: ignore[arg-type]  # read only


def from_hf(
    m: Metadata, name: str, head_dim: int, context: int, *, kind: str | None = None,
    theta: str = "rope_theta", partial: bool = False,
) -> Rotation:  # fmt: skip
    """The rotation that a `config.json` gives layers of `kind` ("full_attention", ...), or all.

    theta: key of the base. partial: True if the family may rotate only a share of each head.
    """
    parameters, base = hf_parameters(m, kind), m.number(theta)
    if parameters.get("rope_theta") is not None:
        base = parameters["rope_theta"]
    factor: Any = None
    if partial:
        factor = m.get("partial_rotary_factor")
        factor = parameters.get("partial_rotary_factor", factor)
    limit = m.size("max_position_embeddings")
    original = parameters.get("original_max_position_embeddings")
    original = m.get("original_max_position_embeddings") or original or limit
    if not isinstance(original, int) or original < 2:
        raise CheckpointError(
            f"{name}: an original_max_position_embeddings of {str(original)[:20]}"
        )
    if not isinstance(base, int | float) or not 1 < base <= LARGEST_BASE:
        raise CheckpointError(f"{name}: a rope base ({theta}) of {str(base)[:20]}")
    for key in PARAMETERS:
        parameters.get(key)
    method = str(parameters.get("rope_type", parameters.get("type", "default")))
    method = "default" if method == "mrope" else method
    scaling = Scaling(method, parameters.get, original, limit, context)
    rotation = scaled(base, _width(head_dim, factor, name), scaling, name)
    return replace(rotation, axes=_axes(parameters, len(rotation.frequencies), name))


def gguf_scaling(checkpoint: Checkpoint, m: Metadata, width: int, context: int) -> Scaling:
    limit = m.size("context_length")
    kind = m.get("rope.scaling.type") or "linear"
    more: dict[str, Any] = {}
    if "rope_factors_long.weight" in checkpoint.tensors:
        kind = "longrope"
        for which in ("long", "short"):
            divisors = checkpoint.tensor(f"rope_factors_{which}.weight", (width // 2,)).vector()
            more[f"{which}_factor"] = divisors
    elif kind == "yarn":
        more["truncate"] = checkpoint.architecture != "gpt-oss"  # which its files do not say
        if m.get("rope.scaling.attn_factor") is not None:  # there a multiplier of what is inferred
            inferred = 0.1 * math.log(max(1.0, m.number("rope.scaling.factor"))) + 1.0
            more["attention_factor"] = m.number("rope.scaling.attn_factor") * inferred
    elif kind == "none" or (kind == "linear" and not m.get("rope.scaling.factor")):
        kind = "default"

    def get(key: str) -> Any:
        return more[key] if key in more else m.get(GGUF_PARAMETERS.get(key, key))

    original = m.size("rope.scaling.original_context_length", limit)
    return Scaling(str(kind), get, original, limit, context)


def from_gguf(checkpoint: Checkpoint, m: Metadata, head_dim: int, context: int) -> Rotation:
    """The rotation of a GGUF file, from its keys and its `rope_freqs` or `rope_factors` tensors."""
    name, base = checkpoint.path.name, m.number("rope.freq_base", 10000.0)
    width = _width(m.size("rope.dimension_count", head_dim), None, name)
    if not 1 < base <= LARGEST_BASE:
        raise CheckpointError(f"{name}: a rope base of {base}")
    rotation = scaled(base, width, gguf_scaling(checkpoint, m, width, context), name)
    if "rope_freqs.weight" in checkpoint.tensors:
        divisors = checkpoint.tensor("rope_freqs.weight", (width // 2,)).vector()
        if not (divisors > 0).all():
            raise CheckpointError(f"{name}: rope_freqs.weight is not positive")
        pairs = zip(rotation.frequencies, divisors, strict=True)
        rotation = replace(rotation, frequencies=tuple(f / float(d) for f, d in pairs))
    if (sections := m.get("rope.dimension_sections")) is not None:
        given = list(sections)[:3] if isinstance(sections, list | tuple) else sections
        turns = checkpoint.architecture in TURNING
        parameters = {"mrope_section": given, "mrope_interleaved": turns}
        rotation = replace(rotation, axes=_axes(parameters, width // 2, name))
    return rotation
