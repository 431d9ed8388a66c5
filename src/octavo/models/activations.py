"""Names of activations in configurations."""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.errors import Unsupported
from octavo.program import Activation

_NAMES: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "relu": "relu", "tanh": "tanh",
    "gelu": "gelu", "gelu_python": "gelu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh",
}  # fmt: skip


def activation(checkpoint: Checkpoint, key: str, value: object) -> Activation:
    """The activation that a configuration's `key` names. Raises Unsupported."""
    if not isinstance(value, str) or value not in _NAMES:
        raise Unsupported(
            f"{checkpoint.path.name}: {key} is {str(value)[:40]}",
            f"supported: {', '.join(_NAMES)}",
        )
    return _NAMES[value]
