"""Rotary frequencies base^(-2i/d) and their rescalings: linear, llama3, yarn, longrope."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError, Unsupported

F32 = npt.NDArray[np.float32]
SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Rotation:
    """Parameters of a rotary embedding; see the Rope operation."""

    frequencies: tuple[float, ...]
    factor: float = 1.0
    interleaved: bool = False
    axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scaling:
    """A rescaling, its parameters by Hugging Face names, from a folder or a GGUF file.

    original: the context length of pre-training. limit: the model's longest context. context: the
    one in use.
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
    """The `width / 2` inverse frequencies, computed in fp32 as transformers does."""
    exponent = np.arange(0, width, 2, dtype=np.int64).astype(np.float32) / np.float32(width)
    wavelengths = np.power(np.float32(base), exponent)
    stretched: F32 = wavelengths if divisors is None else divisors * wavelengths
    return np.float32(1.0) / stretched


def _llama3(inverse: F32, s: Scaling) -> F32:
    """Llama 3.1's rule: long wavelengths are stretched, short ones kept, those between blended."""
    factor, low, high = (s.number(k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    wavelength = 2 * np.pi / inverse.astype(np.float64)
    smooth = np.clip((s.original / wavelength - low) / (high - low), 0, 1)
    return ((1 - smooth) * inverse / factor + smooth * inverse).astype(np.float32)


def _yarn(inverse: F32, base: float, s: Scaling) -> Rotation:
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


def _longrope(base: float, width: int, s: Scaling) -> Rotation:
    """LongRoPE (Ding et al. 2024): a divisor for each pair, from one of two lists.

    The short list is for contexts up to the original one. A longer context takes the long list
    for every position, so that results do not depend on a sequence's later length.
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


def scaled(base: float, width: int, s: Scaling, name: str) -> Rotation:
    """The rotation of `width` features with a rescaling. Raises CheckpointError or Unsupported."""
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


def plain(base: float, head_dim: int) -> Rotation:
    """The rotation of whole heads without a rescaling."""
    return Rotation(_tuple(_inverse(base, head_dim)))
