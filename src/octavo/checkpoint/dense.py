"""The Dense layers that sentence-transformers puts behind a pooled state."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import FLOATS
from octavo.checkpoint.files import read_json
from octavo.checkpoint.safetensors import read_safetensors
from octavo.errors import CheckpointError, ModelNotFound, Unsupported

Vector = npt.NDArray[np.float32]
WIDEST = 1 << 16
_ERF = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(x: Vector) -> Vector:
    return np.asarray(x * 0.5 * (1 + _ERF(x / math.sqrt(2))), np.float32)


def _relu(x: Vector) -> Vector:
    return np.maximum(x, np.float32(0))


def _silu(x: Vector) -> Vector:
    return np.asarray(x * 0.5 * (1 + np.tanh(x.astype(np.float64) / 2)), np.float32)


def _sigmoid(x: Vector) -> Vector:
    return np.asarray(0.5 * (1 + np.tanh(x.astype(np.float64) / 2)), np.float32)


def _tanh(x: Vector) -> Vector:
    return np.tanh(x)


def _identity(x: Vector) -> Vector:
    return x


# By the names of torch's classes.
ACTIVATIONS: dict[str, Callable[[Vector], Vector]] = {
    "Identity": _identity, "Tanh": _tanh, "ReLU": _relu, "GELU": _gelu, "SiLU": _silu,
    "Sigmoid": _sigmoid,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Dense:
    """activation(W x + bias), plus x or R x. Weights are `[out, in]`; add: x takes part."""

    weight: Vector
    bias: Vector | None
    activation: Callable[[Vector], Vector]
    residual: Vector | None = None
    add: bool = False

    def __call__(self, x: Vector) -> Vector:
        # einsum adds up in one fixed order on one thread, unlike a matrix library
        y: Vector = np.einsum("oi,i->o", self.weight, x)
        y = self.activation(y if self.bias is None else y + self.bias)
        if self.residual is not None:
            x = np.einsum("oi,i->o", self.residual, x)
        return y + x if self.add else y

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.weight.shape[0], self.weight.shape[1]


def _size(config: dict[str, Any], key: str, where: str) -> int:
    size = config.get(key)
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= WIDEST:
        raise CheckpointError(f"{where}: {key} is {str(size)[:20]}; 1 to {WIDEST}")
    return size


def _activation(config: dict[str, Any], where: str) -> Callable[[Vector], Vector]:
    # a path that is not torch's own is not followed: sentence-transformers takes Tanh for it
    path = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    kind = path.rpartition(".")[2] if path.startswith("torch.") else "Tanh"
    if kind not in ACTIVATIONS:
        raise Unsupported(
            f"{where}: activation_function {kind[:40]!r}", f"built: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[kind]


def read_dense(folder: Path, model: str) -> Dense:
    """A Dense module's folder. Raises CheckpointError, ModelNotFound or Unsupported."""
    config = read_json(folder / "config.json")
    where = f"{model}: {folder.name}"
    inputs, outputs = (_size(config, key, where) for key in ("in_features", "out_features"))
    activation = _activation(config, where)
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise Unsupported(f"{where}: {key} {str(config[key])[:40]!r}")
    path = folder / "model.safetensors"
    if not os.path.exists(path):
        raise ModelNotFound(
            f"{where} has no model.safetensors   (pickled .bin files are not read)",
            "save the model again with sentence-transformers, which writes safetensors",
        )
    tensors = read_safetensors(path)

    def part(name: str, *shape: int) -> Vector:
        tensor = tensors.pop(name, None)
        if tensor is None or tensor.shape != shape or tensor.type not in FLOATS:
            got = f"is {tensor.type.name} {list(tensor.shape)}" if tensor else "is missing"
            raise CheckpointError(f"{where}: {name} {got}; expected floats {list(shape)}")
        return tensor.vector()

    weight = part("linear.weight", outputs, inputs)
    bias = part("linear.bias", outputs) if config.get("bias", True) else None
    add, residual = bool(config.get("use_residual")), None
    if add and inputs != outputs:
        residual = part("residual.weight", outputs, inputs)
    if tensors:
        raise Unsupported(f"{where}: tensor {min(tensors)[:60]!r}")
    return Dense(weight, bias, activation, residual, add)
