"""Reads the sizes of a decoder from its metadata and checks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError, Unsupported
from octavo.models.metadata import Metadata

Norms = Literal["rms", "layer"]
MAX_HEAD_DIM = 4096  # more is a damaged file


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes that every decoder has. ffn: width of the feed-forward block; eps: of its norms."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    eps: float


@dataclass(frozen=True)
class ExpertsConfig:
    """Number of experts, number that each token is routed to, and width of each."""

    count: int
    used: int
    ffn: int


def read_config(
    checkpoint: Checkpoint, meta: Metadata, keys: Mapping[str, str], embed: str, norms: Norms,
    eps: float | None,
) -> DecoderConfig:  # fmt: skip
    """embed: name of the embedding table. eps: fixed by the family, or None to read it. Raises
    CheckpointError for impossible sizes."""
    name, gguf = checkpoint.path.name, checkpoint.format == "gguf"

    def size(key: str, default: int | None = None) -> int:
        return meta.size(keys[key], default)

    heads, hidden = size("heads"), size("hidden")
    kv_heads, head_dim = size("kv_heads", heads), size("head_dim", max(1, hidden // heads))
    if heads % kv_heads or head_dim > MAX_HEAD_DIM:
        raise CheckpointError(
            f"{name}: {heads} heads over {kv_heads} KV heads of {head_dim} dimensions is impossible"
        )
    if (layers := size("layers")) > (held := len(checkpoint.tensors)):
        raise CheckpointError(f"{name}: {layers} layers, {held} tensors")
    if gguf:
        _check_gguf(meta, name, head_dim)
    if eps is None:
        eps = meta.number(keys["eps" if norms == "rms" else "layer_norm_eps"])
    return DecoderConfig(
        layers=layers, hidden=hidden, ffn=size("ffn", 4 * hidden), heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, context=size("context"), eps=eps,
        vocabulary=checkpoint.tensor(embed + ".weight").shape[0] if gguf else size("vocabulary"),
    )  # fmt: skip


def read_experts(meta: Metadata, keys: Mapping[str, str], ffn: int) -> ExpertsConfig:
    """ffn: width of an expert if the metadata do not say."""
    key = keys["experts"]
    if meta.get("num_local_experts") is not None:  # a synonym
        key = "num_local_experts"
    width = meta.size(keys["expert_ffn"], ffn)
    return ExpertsConfig(meta.size(key), meta.size(keys["experts_used"]), width)


def _check_gguf(meta: Metadata, name: str, head_dim: int) -> None:
    width = meta.size("attention.value_length", head_dim)
    if width != head_dim:
        raise Unsupported(
            f"{name}: attention.key_length is {head_dim}, attention.value_length {width}"
        )
    if not meta.flag("attention.causal", True):
        raise Unsupported(f"{name}: attention.causal is false")
