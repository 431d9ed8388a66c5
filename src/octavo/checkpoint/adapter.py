"""LoRA adapters as PEFT stores them: adapter_config.json beside adapter_model.safetensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.checkpoint.base import Tensor, TensorType
from octavo.checkpoint.files import read_json
from octavo.checkpoint.safetensors import read_safetensors
from octavo.errors import CheckpointError, ModelNotFound, Unsupported

MAX_RANK = 256
PREFIX = "base_model.model."
# What would change the meaning of the factors, with the values that do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "modules_to_save": (None, []),
    "use_dora": (False, None), "fan_in_fan_out": (False, None), "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}), "layer_replication": (None, []), "use_qalora": (False, None),
    "trainable_token_indices": (None, []),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LowRank:
    """y += scale * B A x. a: `[rank, inputs]`; b: `[outputs, rank]`."""

    a: Tensor
    b: Tensor
    scale: float


def read_adapter(folder: Path) -> Mapping[str, LowRank]:
    """Factors by the name of the module they change ("model.layers.0.self_attn.q_proj").

    Raises ModelNotFound, CheckpointError, or Unsupported for what is more than a plain LoRA.
    """
    config_path, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if not config_path.is_file() or not weights.is_file():
        raise ModelNotFound(
            f"{folder.name} has no adapter_config.json with an adapter_model.safetensors beside it"
        )
    config = read_json(config_path)
    for key, values in NEUTRAL.items():
        if config.get(key, values[0]) not in values:
            raise Unsupported(f"{folder.name}: {key} {str(config[key])[:40]!r}")
    alpha, rslora = config.get("lora_alpha"), config.get("use_rslora") is True
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(f"{folder.name}: lora_alpha is {str(alpha)[:40]}")
    tensors = read_safetensors(weights)
    out = {}
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            if not name.endswith(".lora_B.weight"):
                raise Unsupported(f"{folder.name}: tensor {name[:80]!r}")
            continue
        b = tensors.get(name.replace(".lora_A.", ".lora_B."))
        if b is None or len(a.shape) != 2 or len(b.shape) != 2 or b.shape[1] != a.shape[0]:
            raise CheckpointError(f"{folder.name}: {name[:80]!r} has no factor to go with it")
        rank = a.shape[0]
        if not 1 <= rank <= MAX_RANK:
            raise Unsupported(f"{folder.name}: rank {rank}; 1 to {MAX_RANK} are supported")
        if a.type is not b.type or a.type not in (TensorType.F32, TensorType.F16, TensorType.BF16):
            raise Unsupported(f"{folder.name}: {name[:80]!r} is {a.type.name}, {b.type.name}")
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        out[module] = LowRank(a, b, float(alpha) / (math.sqrt(rank) if rslora else rank))
    if not out:
        raise CheckpointError(f"{folder.name}: the adapter is empty")
    return out
