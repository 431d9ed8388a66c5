"""LoRA adapters as PEFT stores them: adapter_config.json beside adapter_model.safetensors."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.checkpoint.base import FLOATS, Tensor
from octavo.checkpoint.files import read_json
from octavo.checkpoint.safetensors import read_safetensors
from octavo.errors import CheckpointError, ModelNotFound, Unsupported

MAX_RANK = 256
MAX_NAME = 128
MAX_PATTERNS = 4096
MAX_SCALE = 1e30  # beyond it, products leave fp32
MATCHING = 1.0  # seconds
PREFIX = "base_model.model."
_REPEATS = re.compile(r"(?<!\()[*+?{]")
DEFAULT_RANK = DEFAULT_ALPHA = 8  # PEFT's
# What would change the meaning of the factors, with the values that do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {"peft_type": ("LORA",), "bias": ("none",)}
# Ways to begin training that leave the model's own weights alone.
BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")
# Read here, or without effect on a trained adapter: how it was trained, and on what. Whether its
# weights are stored transposed (fan_in_fan_out) concerns the model's matrices, not the factors.
KNOWN = {
    *NEUTRAL, "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights",
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules",
    "task_type",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LowRank:
    """y += scale * B A x. a: `[rank, inputs]`; b: `[outputs, rank]`."""

    a: Tensor
    b: Tensor
    scale: float


class _Settings:
    """Rank and scale of each module, as adapter_config.json says. Raises what read_adapter does."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._name = name
        for key, value in config.items():
            harmless = value in NEUTRAL[key] if key in NEUTRAL else key in KNOWN or not value
            if not harmless:
                raise Unsupported(f"{name}: {key[:60]} {ascii(value)[:40]}")
        if (beginning := config.get("init_lora_weights")) not in BEGINNINGS:
            raise Unsupported(
                f"{name}: init_lora_weights {str(beginning)[:40]!r} changes the model's weights",
                "save it with PEFT's path_initial_model_for_weight_conversion",
            )
        self._root = bool(config.get("use_rslora"))
        self._rank = self._integer("r", config.get("r", DEFAULT_RANK))
        self._alpha = self._number("lora_alpha", config.get("lora_alpha", DEFAULT_ALPHA))
        ranks, alphas = (self._patterns(f"{kind}_pattern", config) for kind in ("rank", "alpha"))
        self._ranks = [(p, self._integer("rank_pattern", v)) for p, v in ranks]
        self._alphas = [(p, self._number("alpha_pattern", v)) for p, v in alphas]
        self._deadline = time.monotonic() + MATCHING

    def of(self, module: str) -> tuple[int, float]:
        """Rank and scale of a module: those of the first pattern that its name ends with."""
        if time.monotonic() > self._deadline:
            raise Unsupported(f"{self._name}: rank_pattern, alpha_pattern take too long to match")
        rank = next((v for p, v in self._ranks if p.match(module)), self._rank)
        alpha = next((v for p, v in self._alphas if p.match(module)), self._alpha)
        return rank, alpha / (math.sqrt(rank) if self._root else rank)

    def _integer(self, key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
            raise Unsupported(f"{self._name}: {key} {str(value)[:40]}; ranks of 1 to {MAX_RANK}")
        return value

    def _number(self, key: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"{self._name}: {key} is {str(value)[:40]}, not a number")
        if not abs(value) < MAX_SCALE:
            raise CheckpointError(f"{self._name}: {key} is {str(value)[:40]}, beyond {MAX_SCALE:g}")
        return float(value)

    def _patterns(
        self, key: str, config: Mapping[str, Any]
    ) -> Iterator[tuple[re.Pattern[str], Any]]:
        """As PEFT reads them: expressions for the end of a module's name."""
        table = config.get(key) or {}
        if not isinstance(table, dict) or len(table) > MAX_PATTERNS:
            raise CheckpointError(f"{self._name}: {key} is no table of up to {MAX_PATTERNS} names")
        for pattern, value in table.items():
            # An expression may take for ever, but not with two repetitions, none of a group.
            if (
                len(pattern) > MAX_NAME
                or len(_REPEATS.findall(pattern)) > 2
                or ")" in {pattern[m.start() - 1] for m in _REPEATS.finditer(pattern) if m.start()}
            ):
                raise Unsupported(f"{self._name}: {key} {pattern[:60]!r} repeats too much")
            try:
                yield re.compile(rf"(.*\.)?({pattern})$"), value
            except (re.error, OverflowError, RecursionError):
                raise CheckpointError(
                    f"{self._name}: {key} {pattern[:60]!r} is no regular expression"
                ) from None


def read_adapter(folder: Path) -> Mapping[str, LowRank]:
    """Factors by the name of the module they change ("model.layers.0.self_attn.q_proj").

    Raises ModelNotFound, CheckpointError, or Unsupported for what is more than a plain LoRA.
    """
    config_path, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if not os.path.exists(config_path) or not os.path.exists(weights):
        raise ModelNotFound(
            f"{folder.name[:80]} has no adapter_config.json with an adapter_model.safetensors "
            "beside it"
        )
    settings = _Settings(read_json(config_path), folder.name)
    halves: dict[str, dict[str, Tensor]] = {"A": {}, "B": {}}
    for name, tensor in read_safetensors(weights).items():
        module, _, half = name.removesuffix(".weight").removeprefix(PREFIX).rpartition(".lora_")
        if half not in halves or not name.endswith(".weight") or len(module) > MAX_NAME:
            raise Unsupported(f"{folder.name}: tensor {name[:80]!r}")
        if module in halves[half]:
            raise CheckpointError(f"{folder.name}: {module[:80]!r} has two factors {half}")
        halves[half][module] = tensor
    if not halves["A"]:
        raise CheckpointError(f"{folder.name}: the adapter is empty")
    if single := halves["A"].keys() ^ halves["B"].keys():
        raise CheckpointError(f"{folder.name}: {min(single)[:80]!r} has one of its two factors")
    return {
        module: _low_rank(folder.name, module, a, halves["B"][module], *settings.of(module))
        for module, a in halves["A"].items()
    }


def _low_rank(name: str, module: str, a: Tensor, b: Tensor, rank: int, scale: float) -> LowRank:
    where = f"{name}: {module[:80]!r}"
    if len(a.shape) != 2 or len(b.shape) != 2 or (a.shape[0], b.shape[1]) != (rank, rank):
        raise CheckpointError(
            f"{where} has factors {list(a.shape)} and {list(b.shape)} for a rank of {rank}"
        )
    if a.type is not b.type or a.type not in FLOATS:
        raise Unsupported(f"{where} is {a.type.name}, {b.type.name}")
    return LowRank(a, b, scale)
