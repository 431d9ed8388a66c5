"""Quantized Hugging Face folders: one importer per stored format, all to `Grouped` tensors."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from octavo.checkpoint.base import PACKED, Stored, Tensor
from octavo.checkpoint.quantized import awq, bitsandbytes, compressed, fp8, gptq, mlx, mxfp4
from octavo.checkpoint.quantized.module import Module
from octavo.errors import Unsupported

METHODS: dict[str, ModuleType] = {
    "gptq": gptq, "awq": awq, "compressed-tensors": compressed, "fp8": fp8,
    "bitsandbytes": bitsandbytes, "mxfp4": mxfp4, "mlx": mlx,
}  # fmt: skip


def quantization_of(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Method and settings by a `config.json`, or None. Raises Unsupported for another method."""
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        settings = config.get("quantization")  # MLX
        return ("mlx", settings) if isinstance(settings, dict) else None
    method = settings.get("quant_method")
    if method is None and {"group_size", "bits"} <= settings.keys():
        method = "mlx"
    if str(method) not in METHODS:
        raise Unsupported(
            f"quantization method {str(method)[:40]!r}   (config.json, quantization_config)",
            f"supported: {', '.join(METHODS)}",
        )
    return str(method), settings


def kv_dtype_of(config: Mapping[str, Any]) -> str:
    """What a `config.json` wants keys and values cached as: "int8", or "auto" where it does not say
    or wants what the default is no coarser than."""
    settings = config.get("quantization_config")
    scheme = settings.get("kv_cache_scheme") if isinstance(settings, dict) else None
    if isinstance(scheme, dict) and (scheme.get("num_bits"), scheme.get("type")) == (8, "int"):
        return "int8"
    return "auto"


def _modules(tensors: Mapping[str, Stored], endings: tuple[str, ...]) -> dict[str, Module]:
    parts: dict[str, dict[str, Stored]] = {}
    for name, tensor in tensors.items():
        ending = next((e for e in endings if name.endswith("." + e)), None)
        if ending is not None:
            parts.setdefault(name.removesuffix("." + ending), {})[ending] = tensor
    return {name: Module(name, found) for name, found in parts.items()}


def import_quantized(tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a folder under their plain names, floats as they are.

    Raises CheckpointError for a damaged module, Unsupported for what is not read.
    """
    out: dict[str, Tensor] = dict(tensors)
    found = quantization_of(config)
    if found is not None:
        method, settings = found
        importer = METHODS[method]
        for module in _modules(tensors, importer.ENDINGS).values():
            if not module.has(importer.KEY):
                continue
            made = importer.read(module, settings)
            if made is not None:
                for part in module.stored.values():
                    out.pop(part.name, None)
                out |= {t.name: t for t in (made if isinstance(made, list) else [made])}
    return {name: tensor for name, tensor in out.items() if tensor.type in PACKED}
