"""W8A8: weights and the inputs of layers as int8, and SmoothQuant, which shares out the difficulty.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models" (arXiv:2211.10438). A few features of inputs are far larger than the others, so that int8
leaves little for these; inputs are divided by s = max|x|^a / max|w|^(1 - a) and the columns of
weights multiplied by it, where what makes the inputs can take that (`folding.py`). Here a is
searched for each input on the error of the layers' outputs, and no scales are among the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.compress.awq import Foldable
from octavo.compress.clipping import range_quantize
from octavo.compress.fit import F32, divide
from octavo.compress.grids import Grid, Quantized, check_finite, quantize
from octavo.compress.recipes import Activations
from octavo.compress.statistics import InputStatistics

W8 = Grid(8, 0, True)
LEVELS = np.float32(127)
ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SHARES = tuple(0.85**i for i in range(20))  # of the largest input of all that a step spans
SAMPLES = 256  # inputs that errors are measured on
STATIC = 1.25  # of what steps of tokens lose, that one step for all may lose
SMALLEST = np.float32(1e-5)


@dataclass(frozen=True, slots=True)
class Int8Layers:
    """Layers of one input as int8, a scale an output. weights: of columns times `scales`, None
    where inputs stay as they are; input_scale: the step of all inputs, None where tokens have
    their own; error: of outputs, as a share of their mean square; plain_error: without scales."""

    weights: tuple[Quantized, ...]
    scales: F32 | None
    alpha: float | None
    input_scale: float | None
    error: float
    plain_error: float


def int8_inputs(x: F32, step: float | None = None) -> F32:
    """Inputs `[tokens, features]` as int8 times a step holds them; None: each token's own step."""
    widest = np.abs(x).max(axis=1, keepdims=True, initial=0)
    steps = widest / LEVELS if step is None else np.full_like(widest, step)
    codes = np.clip(np.rint(divide(x, steps)), -LEVELS - 1, LEVELS)
    return np.asarray(codes * steps, np.float32)


def w8a8(
    weights: Sequence[F32], inputs: InputStatistics, activations: Activations,
    foldable: Foldable | None,
) -> Int8Layers:  # fmt: skip
    """Rounds the `[outputs, inputs]` weights of layers that share an input to int8 for int8 inputs.

    activations: static has one step for all tokens only where that loses at most `STATIC` times
    what steps of their own do. foldable: as for `awq`; None for no SmoothQuant. Scales that lose
    more than none are not returned. Raises UsageError as `quantize` does.
    """
    for x in weights:
        check_finite(x)
    task = _Task(weights, inputs, activations == "static")
    plain_scale, plain, plain_error = task.made(None)
    found = Int8Layers(plain, None, None, plain_scale, plain_error, plain_error)
    alpha, scales = (None, None) if foldable is None else task.search(foldable)
    if scales is not None:
        step, made, error = task.made(scales)
        if error < plain_error:
            return Int8Layers(made, scales, alpha, step, error, plain_error)
    return found


def smoothing_scales(weights: Sequence[F32], max_abs: F32, alpha: float) -> F32:
    """max|x|^alpha / max|w|^(1 - alpha) of each feature, 1 where nothing is ever put in."""
    widest = np.max([np.abs(x).max(axis=0) for x in weights], axis=0)
    found = np.maximum(max_abs, SMALLEST) ** np.float32(alpha)
    found = found / np.maximum(widest, SMALLEST) ** np.float32(1 - alpha)
    return np.where(max_abs > 0, np.maximum(found, SMALLEST), 1).astype(np.float32)


class _Task:
    """Layers, and inputs and outputs that errors are measured on."""

    def __init__(self, weights: Sequence[F32], inputs: InputStatistics, static: bool) -> None:
        self.weights, self.static, self.max_abs = weights, static, inputs.max_abs
        self.samples = inputs.samples[:: -(-len(inputs.samples) // SAMPLES) or 1]
        self.wanted = [self.samples @ x.T for x in weights]
        self.energy = sum(float((y.astype(np.float64) ** 2).sum()) for y in self.wanted)

    def search(self, foldable: Foldable) -> tuple[float | None, F32 | None]:
        """The exponent and scales of least error with grids that span rows and steps of tokens."""
        best = self.error([range_quantize(x, W8) for x in self.weights], None, None)
        found: tuple[float | None, F32 | None] = (None, None)
        for alpha in ALPHAS:
            s = foldable(smoothing_scales(self.weights, self.max_abs, alpha))
            if not (np.isfinite(s).all() and (s > 0).all()):
                continue
            error = self.error([range_quantize(x * s, W8) for x in self.weights], s, None)
            if error < best:
                best, found = error, (alpha, s)
        return found

    def made(self, s: F32 | None) -> tuple[float | None, tuple[Quantized, ...], float]:
        """The step of inputs, the rounded weights and their error with scales s."""
        made = tuple(quantize(x if s is None else x * s, W8) for x in self.weights)
        values = [q.values() for q in made]
        error = self.error(values, s, None)
        if self.static:
            widest = float((self.max_abs if s is None else self.max_abs / s).max(initial=0))
            steps = [widest / float(LEVELS) * x for x in SHARES] if widest > 0 else [1.0]
            fixed, step = min((self.error(values, s, each), each) for each in steps)
            if fixed <= STATIC * error:
                return step, made, fixed
        return None, made, error

    def error(self, values: Sequence[F32], s: F32 | None, step: float | None) -> float:
        """What the samples' outputs lose, as a share of their mean square."""
        x = int8_inputs(self.samples if s is None else self.samples / s, step)
        pairs = zip(values, self.wanted, strict=True)
        lost = sum(float(((x @ v.T - y).astype(np.float64) ** 2).sum()) for v, y in pairs)
        return lost / self.energy if self.energy > 0 else 0.0
