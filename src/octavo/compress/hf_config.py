"""The config.json that transformers would have for a GGUF file.

Sizes are read from the file's keys; what depends on the layer (windows, rotation, scales) from the
program that the file builds, so that it is what the file computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.checkpoint.base import FLOATS, Checkpoint, TensorType
from octavo.compress.tokenizer_files import token_ids
from octavo.errors import Unsupported
from octavo.models.defaults import DEFAULTS
from octavo.models.metadata import Metadata
from octavo.models.rotation import PARAMETERS, gguf_scaling
from octavo.models.schemes import Scheme
from octavo.program import Attention, Linear, Program, Rope, Route, Softcap

_NAMES = {TensorType.F32: "float32", TensorType.F16: "float16", TensorType.BF16: "bfloat16"}
_BIASED = {"attn_q.bias": "attention_bias", "ffn_up.bias": "mlp_bias"}


def plain(value: Any) -> Any:
    """The shortest decimal of a 32-bit float: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def hf_config(
    checkpoint: Checkpoint, program: Program, scheme: Scheme, kind: TensorType
) -> dict[str, Any]:
    """kind: the type of the model's matrices. Raises Unsupported for what config.json cannot
    say."""
    prefix, tensors = f"{checkpoint.architecture}.", checkpoint.tensors
    assert kind in FLOATS
    config: dict[str, Any] = {
        "architectures": [scheme.class_name], "model_type": scheme.model_type,
        "torch_dtype": _NAMES[kind], **DEFAULTS[scheme.model_type],
    }  # fmt: skip
    for synonym in {"rope_parameters", "num_experts"} - {*scheme.settings.values()}:
        config.pop(synonym, None)
    for key, name in scheme.settings.items():
        value = checkpoint.metadata.get(prefix + key)
        if value is not None and not isinstance(value, list):
            config[name] = plain(value)
    config["vocab_size"] = program.vocabulary
    config["tie_word_embeddings"] = "output.weight" not in tensors
    for ending, key in _BIASED.items():
        if key in config:
            config[key] = f"blk.0.{ending}" in tensors
    config |= _attention(program, config, scheme)
    config |= _rotation(checkpoint, program, config)
    ids = token_ids(checkpoint.metadata)
    return config | {k: ids.get(k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _attention(program: Program, config: Mapping[str, Any], scheme: Scheme) -> dict[str, Any]:
    """Heads, windows, soft caps, routing."""
    ops = [op for op in program.ops if isinstance(op, Attention)]
    first, out = ops[0], dict[str, Any]()
    widths = [op.x.width for op in program.ops if isinstance(op, Linear)]
    width = next(op.q.width for op in ops) // first.heads
    if "head_dim" in DEFAULTS[scheme.model_type] or width * first.heads != widths[0]:
        out["head_dim"] = width
    sizes = [op.window for op in ops]
    if any(sizes) or "sliding_window" in config:
        out["sliding_window"] = max(sizes) or None
    if len(set(sizes)) > 1:
        kinds = ["sliding_attention" if size else "full_attention" for size in sizes]
        out["layer_types"] = kinds
    if "query_pre_attn_scalar" in config:
        scalar = first.scale**-2
        out["query_pre_attn_scalar"] = (
            round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar
        )
        caps = [op.cap for op in program.ops if isinstance(op, Softcap)]
        out["attn_logit_softcapping"] = first.softcap or None
        out["final_logit_softcapping"] = plain(caps[0]) if caps else None
    rotated = {_layer_of(op, ops) for op in program.ops if isinstance(op, Rope)}
    if "no_rope_layer_interval" in config:
        out["no_rope_layers"] = [int(op.layer in rotated) for op in ops]
    routes = [op for op in program.ops if isinstance(op, Route)]
    if routes and "norm_topk_prob" in config:
        out["norm_topk_prob"] = routes[0].normalize
    return out


def _layer_of(rope: Rope, ops: list[Attention]) -> int | None:
    """The layer whose queries or keys a rotation makes."""
    return next((op.layer for op in ops if rope.out in (op.q, op.k)), None)


def _rotation(
    checkpoint: Checkpoint, program: Program, config: Mapping[str, Any]
) -> dict[str, Any]:
    """The base and the rescaling of rotary embeddings."""
    if "rope_theta" not in config:
        return {}
    m = Metadata(checkpoint)
    attention = next(op for op in program.ops if isinstance(op, Attention))
    head_dim = attention.q.width // attention.heads
    width = m.size("rope.dimension_count", head_dim)
    base, local = m.number("rope.freq_base", 10000.0), m.get("rope.freq_base_swa")
    out: dict[str, Any] = {"rope_theta": plain(base)}
    if "rope_local_base_freq" in config and local is not None:
        out["rope_local_base_freq"] = plain(local)
    if width != head_dim or "partial_rotary_factor" in config:
        out["partial_rotary_factor"] = width / head_dim
    scaling = gguf_scaling(checkpoint, m, width, program.context)
    if "rope_freqs.weight" in checkpoint.tensors:
        divisors = checkpoint.tensor("rope_freqs.weight").vector()
        out["rope_scaling"] = _llama3(divisors, base, width, checkpoint.path.name)
    elif scaling.kind != "default":
        found = {key: scaling.get(key) for key in PARAMETERS}
        given = {k: _listed(v) for k, v in found.items() if v is not None}
        out["rope_scaling"] = {"rope_type": scaling.kind, **given}
        if scaling.kind == "longrope":
            out["original_max_position_embeddings"] = scaling.original
        elif scaling.original != scaling.limit or scaling.kind == "yarn":
            out["rope_scaling"]["original_max_position_embeddings"] = scaling.original
    return out


def _listed(value: Any) -> Any:
    return [plain(float(v)) for v in value] if isinstance(value, np.ndarray) else plain(value)


def _llama3(divisors: np.ndarray[Any, Any], base: float, width: int, name: str) -> dict[str, Any]:
    """Llama 3's parameters by the divisors that they give. Raises Unsupported.

    With factor f, a divisor d stands for a share s = (1/d - 1/f) / (1 - 1/f) of frequencies that
    are kept, and between 0 and 1 that is (n / wavelength - low) / (high - low): a line, of which
    n, low and high have a factor in common. Llama's low is 1.
    """
    d = divisors.astype(np.float64)
    frequencies = base ** (-np.arange(0, width, 2) / width)
    factor = float(d.max())
    share = (1 / d - 1 / factor) / (1 - 1 / factor) if factor > 1 else np.ones_like(d)
    between = (share > 1e-6) & (share < 1 - 1e-6)
    if between.sum() < 2:
        raise Unsupported(
            f"{name}: rope_freqs.weight is not a rescaling that config.json can say",
            "use the model's Hugging Face folder",
        )
    slope, start = np.polyfit(frequencies[between] / (2 * np.pi), share[between], 1)
    high = 1 - 1 / start
    original = slope * (high - 1)
    return {
        "rope_type": "llama3", "factor": _near(factor), "low_freq_factor": 1.0,
        "high_freq_factor": _near(high), "original_max_position_embeddings": round(original),
    }  # fmt: skip


def _near(value: float) -> float:
    """The value, rounded if that is what fp32 has made of a round one."""
    return float(round(value, 3)) if abs(value - round(value, 3)) < 1e-3 * value else value
