"""Qwen 3, dense and with experts: llama with norms on each head of queries and keys."""

from __future__ import annotations

from octavo.checkpoint import Checkpoint
from octavo.models.decoder import SOFTMAX, Decoder
from octavo.models.qwen2 import layer_windows
from octavo.program import Program


def _sparse(d: Decoder) -> list[bool]:
    """True for each layer that has experts."""
    layers = range(d.config.layers)
    if d.gguf or d.checkpoint.architecture != "qwen3_moe":
        return [d.gguf and d.has("router", i) for i in layers]
    step, dense = d.meta.size("decoder_sparse_step", 1), d.meta.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise d.meta.bad("mlp_only_layers", dense)
    return [i not in dense and (i + 1) % step == 0 for i in layers]


def _windows(d: Decoder) -> list[int]:
    """The window of each layer; 0: none. Models with experts have it in all layers."""
    if d.gguf or d.checkpoint.architecture != "qwen3_moe":
        return layer_windows(d)
    size, used = d.window, d.meta.flag("use_sliding_window")
    return [size if used else 0] * d.config.layers


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of a Qwen 3 checkpoint. Raises CheckpointError or Unsupported."""
    d = Decoder(checkpoint)
    rotation, activation, sparse = d.rotation(context), d.activation("silu"), _sparse(d)
    normalize = False
    if any(sparse):
        d.gate_by(SOFTMAX)
        key = "expert_weights_norm" if d.gguf else "norm_topk_prob"
        normalize = d.meta.flag(key, d.gguf)
    x = d.embed()
    for i, window in enumerate(_windows(d)):
        y = d.norm(x, "attn_norm", i)
        x = d.b.add(x, d.attention(y, i, rotation, window=window, qk_norm="heads"))
        y = d.norm(x, "ffn_norm", i)
        h = d.experts(y, i, activation, normalize) if sparse[i] else d.glu(y, i, activation)
        x = d.b.add(x, h)
    return d.build(x)
