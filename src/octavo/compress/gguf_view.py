"""A Hugging Face folder seen as the GGUF file that llama.cpp's converter would make of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from octavo.checkpoint.base import Checkpoint, Computed, Tensor, TensorType
from octavo.compress.counterparts import Counterpart, of_gguf
from octavo.compress.fit import F32
from octavo.compress.folder_view import check_same
from octavo.compress.vocabulary import vocabulary
from octavo.errors import Unsupported
from octavo.models import build_program
from octavo.models.metadata import Metadata
from octavo.models.rope import plain
from octavo.models.rotation import hf_parameters
from octavo.models.schemes import FOLDERS, Scheme
from octavo.models.wrapped import language_model
from octavo.program import Attention, Experts, Program, Rope, Route, Softcap


def gguf_parts(checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[Counterpart, ...]]:
    """The folder as a GGUF file, block formats as F32, and what its tensors are made of.

    Raises Unsupported for a model that no GGUF file can say here.
    """
    model_type = checkpoint.architecture
    folder = language_model(checkpoint)
    program = build_program(folder)
    if folder.architecture not in FOLDERS:
        raise Unsupported(
            f"{checkpoint.path.name}: {model_type!r} models have no GGUF form here",
            f"built: {', '.join(FOLDERS)}",
        )
    arch, scheme = FOLDERS[folder.architecture]
    parts = tuple(of_gguf(folder, program, scheme))
    rotation, extra = _rotation(folder, program)
    settings = _sizes(folder, program, scheme) | _layers(folder, program) | rotation
    metadata = {
        "general.architecture": arch, "general.type": "model",
        "general.name": checkpoint.path.resolve().name, "general.quantization_version": 2,
        **{f"{arch}.{key}": value for key, value in settings.items()},
        **vocabulary(checkpoint, program.vocabulary),
    }  # fmt: skip
    tensors: dict[str, Tensor] = {p.name: p.tensor(TensorType.F32) for p in parts} | extra
    view = replace(checkpoint, format="gguf", metadata=metadata, tensors=tensors, files={})
    check_same(view, program, build_program(view))
    return view, parts


def _sizes(checkpoint: Checkpoint, program: Program, scheme: Scheme) -> dict[str, Any]:
    m, out = Metadata(checkpoint), dict[str, Any]()
    for key, name in scheme.settings.items():
        value = m.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            out[key] = value
    first = next(op for op in program.ops if isinstance(op, Attention))
    out["attention.head_count_kv"] = first.kv_heads
    width = first.q.width // first.heads
    out.pop("attention.sliding_window", None)
    if "head_dim" in checkpoint.metadata or width * first.heads != out["embedding_length"]:
        out["attention.key_length"] = out["attention.value_length"] = width
    out.setdefault("feed_forward_length", 4 * out["embedding_length"])
    return out | {"vocab_size": program.vocabulary}


def _layers(checkpoint: Checkpoint, program: Program) -> dict[str, Any]:
    """Windows, soft caps, experts: what the program computes."""
    ops = [op for op in program.ops if isinstance(op, Attention)]
    out: dict[str, Any] = {}
    if any(op.window for op in ops):
        out["attention.sliding_window"] = max(op.window for op in ops)
        if checkpoint.architecture == "olmo3":
            out["attention.sliding_window_pattern"] = [op.window > 0 for op in ops]
    if ops[0].softcap:
        out["attn_logit_softcapping"] = ops[0].softcap
    for op in program.ops:
        if isinstance(op, Softcap):
            out["final_logit_softcapping"] = op.cap
        if isinstance(op, Route):
            out |= {"expert_count": op.x.width, "expert_used_count": op.top_k}
            if Metadata(checkpoint).knows("norm_topk_prob"):
                out["expert_weights_norm"] = op.normalize
        if isinstance(op, Experts):
            out["expert_feed_forward_length"] = op.gate[0].tensor.shape[0]
    return out


def _rotation(checkpoint: Checkpoint, program: Program) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Keys and tensors of rotary embeddings; those of full attention where kinds differ."""
    ropes = [op for op in program.ops if isinstance(op, Rope)]
    if not ropes:
        return {}, {}
    m = Metadata(checkpoint)
    by_kind = "full_attention" in (m.get("rope_parameters") or {})
    kind = "full_attention" if by_kind or m.knows("rope_local_base_freq") else None
    parameters = hf_parameters(m, kind)
    base = parameters.get("rope_theta") or m.number("rope_theta")
    width = 2 * len(ropes[0].frequencies)
    out: dict[str, Any] = {"rope.freq_base": float(base), "rope.dimension_count": width}
    if m.knows("rope_local_base_freq"):
        local = hf_parameters(m, "sliding_attention").get("rope_theta")
        out["rope.freq_base_swa"] = float(local or m.number("rope_local_base_freq"))
    scaling, tensors = _scaling(m, parameters, program, float(base), width)
    return out | scaling, tensors


def _scaling(
    m: Metadata, p: Mapping[str, Any], program: Program, base: float, width: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    method = str(p.get("rope_type", p.get("type", "default")))
    limit = m.size("max_position_embeddings")
    original = m.get("original_max_position_embeddings") or p.get(
        "original_max_position_embeddings", limit
    )
    if method == "llama3":
        rope = next(op for op in program.ops if isinstance(op, Rope))
        ratio = np.array(plain(base, width).frequencies) / np.array(rope.frequencies)
        return {}, {"rope_freqs.weight": _vector("rope_freqs.weight", ratio)}
    if method in ("longrope", "su"):
        rope = next(op for op in program.ops if isinstance(op, Rope))
        keys = {"rope.scaling.original_context_length": original}
        keys["rope.scaling.attn_factor"] = rope.factor
        names = {which: f"rope_factors_{which}.weight" for which in ("long", "short")}
        return keys, {n: _vector(n, np.array(p[f"{w}_factor"])) for w, n in names.items()}
    out: dict[str, Any] = {}
    if method in ("linear", "yarn"):
        out = {"rope.scaling.type": method, "rope.scaling.factor": float(p["factor"])}
    if method == "yarn":
        out["rope.scaling.original_context_length"] = original
        for key in ("beta_fast", "beta_slow"):
            if p.get(key) is not None:
                out[f"rope.scaling.yarn_{key}"] = float(p[key])
    return out, {}


def _vector(name: str, values: np.ndarray[Any, Any]) -> Tensor:
    held: F32 = values.astype(np.float32)
    return Computed(name, TensorType.F32, held.shape, held.nbytes, lambda: held)
