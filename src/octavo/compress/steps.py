"""What calibrated recipes do with each layer, knowing its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.compress.awq import Foldable, best_scales
from octavo.compress.calibration import FinishedLayer
from octavo.compress.clipping import clip_quantize
from octavo.compress.fit import F32, Hessian
from octavo.compress.gptq import Outputs, gptq
from octavo.compress.grids import Grid, Quantized, Scheme, check_finite, quantize
from octavo.compress.healing import heal
from octavo.compress.journal import Arrays
from octavo.compress.recipes import Activations, Method
from octavo.compress.smoothquant import w8a8
from octavo.compress.statistics import InputStatistics
from octavo.compress.writing import named

SENSITIVE = 5e-4  # share of the mean square of outputs
Search = Callable[[Sequence[F32], InputStatistics, Foldable], F32 | None]


def _gptq(x: F32, hessian: Hessian, grid: Grid) -> Quantized:
    return gptq(x, hessian, grid).weights


def _healed(x: F32, hessian: Hessian, grid: Grid) -> Quantized:
    return heal(x, _gptq(x, hessian, grid), hessian)


_ROUNDERS: dict[Method, Callable[[F32, Hessian, Grid], Quantized]] = {
    "gptq": _gptq,
    "healed": _healed,
    "distilled": _healed,
    "awq": clip_quantize,
    "smoothquant": _gptq,
}


def grid_of(schemes: Mapping[str, Scheme], name: str) -> Grid:
    """The grid of a layer; calibrated recipes have no other schemes."""
    scheme = schemes[name]
    assert isinstance(scheme, Grid)
    return scheme


@dataclass(frozen=True)
class RoundLayers:
    """Rounds layers by a method, or to the nearest where that loses less of the outputs. With int8
    inputs, those of one input are treated alike, as servers that compute them at once need it: they
    stay as they are where outputs lose more than `SENSITIVE`."""

    schemes: Mapping[str, Scheme]
    method: Method
    activations: Activations | None = None

    def make(self, layers: Mapping[str, F32], inputs: InputStatistics) -> dict[str, FinishedLayer]:
        step = np.zeros(0, np.float32)
        if self.activations is not None:
            for name, x in layers.items():
                with named(name):
                    check_finite(x)
            found = w8a8(list(layers.values()), inputs, self.activations, None)
            if found.error > SENSITIVE:
                return {name: FinishedLayer({}, {}) for name in layers}
            step = np.array([s for s in (found.input_scale,) if s is not None], np.float32)
        out: dict[str, FinishedLayer] = {}
        for name, x in layers.items():
            with named(name):
                out[name] = self._rounded(name, x, inputs.gram, step)
        return out

    def _rounded(self, name: str, weights: F32, hessian: Hessian, step: F32) -> FinishedLayer:
        grid, outputs = grid_of(self.schemes, name), Outputs(weights, hessian)
        plain = quantize(weights, grid)
        plain_error = outputs.error(plain.values())
        q = _ROUNDERS[self.method](weights, hessian, grid)
        error, method = outputs.error(q.values()), str(self.method)
        if not error <= plain_error:
            q, error, method = plain, plain_error, "rtn"
        arrays: Arrays = {"codes": q.codes, "scales": q.scales, "zeros": q.zeros, "step": step}
        notes = {"method": method, "error": error, "plain": plain_error}
        return FinishedLayer(arrays, notes, q.values())

    def weights(self, name: str, arrays: Arrays) -> F32:
        return self.quantized(name, arrays).values()

    def quantized(self, name: str, arrays: Arrays) -> Quantized:
        """A layer as it was rounded."""
        grid = grid_of(self.schemes, name)
        return Quantized(grid, arrays["codes"], arrays["scales"], arrays["zeros"])


class Importance:
    """Looks at inputs and changes nothing: the mean square of each feature."""

    def make(self, layers: Mapping[str, F32], inputs: InputStatistics) -> dict[str, FinishedLayer]:
        return {name: FinishedLayer({"importance": inputs.mean_square}, {}) for name in layers}

    def weights(self, name: str, arrays: Arrays) -> None:
        return None


def search_of(method: Method, grid: Grid, activations: Activations | None) -> Search | None:
    """How a method finds scales of inputs to fold in before it rounds; None if it does not."""
    if method == "awq":
        return lambda weights, inputs, foldable: best_scales(
            weights, inputs.mean_abs, inputs.gram, grid, foldable
        )[1]
    if method == "smoothquant" and activations is not None:
        return lambda weights, inputs, foldable: w8a8(weights, inputs, activations, foldable).scales
    return None
