"""Rotary frequencies: base^(-2i/d), and the rescalings that checkpoints ask for."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError, Unsupported
from octavo.models.metadata import Metadata

F32 = npt.NDArray[np.float32]
SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# What rescalings are told, each by some: transformers leaves those of the others unread.
PARAMETERS = (
    "rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor",
    "long_factor", "low_freq_factor", "high_freq_factor", "finetuned",
)  # fmt: skip
GGUF_PARAMETERS = {
    "factor": "rope.scaling.factor", "attention_factor": "rope.scaling.attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow",
}  # fmt: skip


@dataclass(frozen=True)
class Rotation:
    """How a layer turns queries and keys; see the Rope operation."""

    frequencies: tuple[float, ...]
    factor: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True)
class _Scaling:
    """A rescaling under its Hugging Face names, whichever file it comes from.

    original: the context the frequencies were first trained for. limit: the longest one.
    context: the one in use.
    """

    kind: str
    get: Callable[[str], Any]
    original: int
    limit: int
    context: int

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise CheckpointError(f"the rope scaling's {key} is {str(value)[:40]}")
        return float(value)


def _inverse(base: float, width: int, divisors: F32 | None = None) -> F32:
    """The `width / 2` inverse frequencies, in fp32 as the field computes them."""
    exponent = np.arange(0, width, 2, dtype=np.int64).astype(np.float32) / np.float32(width)
    wavelengths = np.power(np.float32(base), exponent)
    stretched: F32 = wavelengths if divisors is None else divisors * wavelengths
    return np.float32(1.0) / stretched


def _llama3(inverse: F32, s: _Scaling) -> F32:
    """Llama 3.1's rule: long wavelengths are stretched, short ones kept, those between blended."""
    factor, low, high = (s.number(k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    wavelength = 2 * np.pi / inverse.astype(np.float64)
    smooth = np.clip((s.original / wavelength - low) / (high - low), 0, 1)
    return ((1 - smooth) * inverse / factor + smooth * inverse).astype(np.float32)


def _yarn(inverse: F32, base: float, s: _Scaling) -> Rotation:
    """YaRN (Peng et al. 2023): slow pairs are interpolated, fast ones kept, with a ramp between."""
    factor, width = s.number("factor"), 2 * len(inverse)

    def dimension(rotations: float) -> float:
        return width * math.log(s.original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(s.number("beta_fast", 32)), dimension(s.number("beta_slow", 1))
    if s.get("truncate") is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = (np.arange(len(inverse), dtype=np.float32) - low) / max(high - low, 0.001)
    kept = 1 - np.clip(ramp, 0, 1).astype(np.float32)
    blended = inverse / np.float32(factor) * (1 - kept) + inverse * kept

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    m, every = s.get("mscale"), s.get("mscale_all_dim")
    inferred = mscale(m) / mscale(every) if m and every else mscale(1)
    return Rotation(_tuple(blended), s.number("attention_factor", inferred))


def _longrope(base: float, width: int, s: _Scaling) -> Rotation:
    """LongRoPE (Ding et al. 2024): one divisor a pair, from one of two lists.

    The short list serves contexts up to the original one; a longer context in use takes the long
    list for every position, so that no token depends on how long its sequence will become.
    """
    long = s.context > s.original
    divisors = np.asarray(s.get("long_factor" if long else "short_factor"), np.float32)
    if divisors.shape != (width // 2,) or not (divisors > 0).all():
        raise CheckpointError(f"the rope scaling needs {width // 2} positive divisors")
    factor = s.number("factor", s.limit / s.original)
    inferred = math.sqrt(1 + math.log(factor) / math.log(s.original)) if factor > 1 else 1.0
    frequencies = _tuple(_inverse(base, width, divisors))
    return Rotation(frequencies, s.number("attention_factor", inferred))


def _tuple(inverse: F32) -> tuple[float, ...]:
    return tuple(inverse.astype(np.float32).tolist())


def _scaled(base: float, width: int, s: _Scaling, name: str) -> Rotation:
    inverse = _inverse(base, width)
    try:
        if s.kind in ("default", "dynamic"):  # dynamic NTK changes nothing within the context
            return Rotation(_tuple(inverse))
        if s.kind == "linear":
            return Rotation(_tuple(inverse / np.float32(s.number("factor"))))
        if s.kind == "llama3":
            return Rotation(_tuple(_llama3(inverse, s)))
        if s.kind == "yarn":
            return _yarn(inverse, base, s)
        if s.kind in ("longrope", "su"):
            return _longrope(base, width, s)
    except CheckpointError as e:
        raise CheckpointError(f"{name}: {e}") from None
    except (KeyError, TypeError, ValueError, ArithmeticError):
        raise CheckpointError(f"{name}: the rope scaling is incomplete") from None
    raise Unsupported(f"{name}: rope scaling {s.kind[:40]!r}", f"supported: {', '.join(SCALINGS)}")


def _width(head_dim: int, part: object, name: str) -> int:
    width = int(head_dim * part) if isinstance(part, int | float) else head_dim
    if not 2 <= width <= head_dim or width % 2:
        raise CheckpointError(f"{name}: {width} of {head_dim} features cannot be rotated")
    return width


def plain(base: float, head_dim: int) -> Rotation:
    """All of every head, without a rescaling."""
    return Rotation(_tuple(_inverse(base, head_dim)))


def _parameters(m: Metadata, kind: str | None) -> Mapping[str, Any]:
    """What config.json says of one kind of layers, or of all.

    Where kinds are rotated each in its own way, `rope_parameters` names them (transformers 5),
    and a `rope_scaling` (before) is for those with full attention.
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

    theta: the key of the base. partial: whether the family rotates a part of a head.
    """
    parameters, base = _parameters(m, kind), m.number(theta)
    if parameters.get("rope_theta") is not None:
        base = parameters["rope_theta"]
    part: Any = None
    if partial:
        part = m.get("partial_rotary_factor")
        part = parameters.get("partial_rotary_factor", part)
    limit = m.size("max_position_embeddings")
    original = parameters.get("original_max_position_embeddings")
    original = m.get("original_max_position_embeddings") or original or limit
    if not isinstance(original, int) or original < 2:
        raise CheckpointError(
            f"{name}: an original_max_position_embeddings of {str(original)[:20]}"
        )
    if not isinstance(base, int | float) or not 1 < base < math.inf:
        raise CheckpointError(f"{name}: a rope base ({theta}) of {str(base)[:20]}")
    for key in PARAMETERS:
        parameters.get(key)
    method = str(parameters.get("rope_type", parameters.get("type", "default")))
    scaling = _Scaling(method, parameters.get, original, limit, context)
    return _scaled(base, _width(head_dim, part, name), scaling, name)


def _gguf_scaling(checkpoint: Checkpoint, m: Metadata, width: int, context: int) -> _Scaling:
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
    return _Scaling(str(kind), get, original, limit, context)


def from_gguf(checkpoint: Checkpoint, m: Metadata, head_dim: int, context: int) -> Rotation:
    """The rotation of a GGUF file: its keys, its `rope_freqs` divisors or its two lists."""
    name, base = checkpoint.path.name, m.number("rope.freq_base", 10000.0)
    width = _width(m.size("rope.dimension_count", head_dim), None, name)
    if base <= 1:
        raise CheckpointError(f"{name}: a rope base of {base}")
    rotation = _scaled(base, width, _gguf_scaling(checkpoint, m, width, context), name)
    if "rope_freqs.weight" in checkpoint.tensors:
        divisors = checkpoint.tensor("rope_freqs.weight", (width // 2,)).vector()
        if not (divisors > 0).all():
            raise CheckpointError(f"{name}: rope_freqs.weight is not positive")
        pairs = zip(rotation.frequencies, divisors, strict=True)
        rotation = replace(rotation, frequencies=tuple(f / float(d) for f, d in pairs))
    return rotation
