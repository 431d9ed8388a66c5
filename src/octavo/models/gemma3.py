"""Gemma 3 text: scaled embeddings, four norms a layer, QK norm, GeGLU, sliding windows.

Five of six layers see a window and use rotary base 10,000; every sixth sees everything and uses
the checkpoint's base. Hugging Face stores norm weights as w for 1 + w; GGUF stores 1 + w.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError, Unsupported
from octavo.models import llama, rope
from octavo.models.metadata import Metadata
from octavo.program import Builder, Program, Value

LOCAL_BASE = 10000.0
PATTERN = 6  # every sixth layer is global
LAYERS_27B = 62  # the one size whose query scale is not 1/sqrt(head_dim)

GGUF_NAMES = llama.GGUF_NAMES | {
    "attn_post": "blk.{}.post_attention_norm.weight", "ffn_post": "blk.{}.post_ffw_norm.weight",
    "q_norm": "blk.{}.attn_q_norm.weight", "k_norm": "blk.{}.attn_k_norm.weight",
}  # fmt: skip
HF_NAMES = llama.HF_NAMES | {
    "attn_post": "model.layers.{}.post_attention_layernorm.weight",
    "ffn_norm": "model.layers.{}.pre_feedforward_layernorm.weight",
    "ffn_post": "model.layers.{}.post_feedforward_layernorm.weight",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    eps: float
    scale: float
    window: int
    full_layers: frozenset[int]
    local: tuple[float, ...]  # rotary frequencies of windowed layers
    full: tuple[float, ...]  # and of the others
    norm_offset: float
    tied: bool


def every_sixth(layers: int) -> frozenset[int]:
    return frozenset(range(PATTERN - 1, layers, PATTERN))


def from_gguf(checkpoint: Checkpoint) -> Config:
    prefix = checkpoint.architecture + "."
    m = Metadata(checkpoint, prefix)
    layers, heads, hidden = (
        m.size("block_count"),
        m.size("attention.head_count"),
        m.size("embedding_length"),
    )
    head_dim = m.size("attention.key_length", 256)
    base = rope.frequencies(m.number("rope.freq_base", 1e6), head_dim)
    query = hidden // heads if layers == LAYERS_27B else head_dim
    return Config(
        layers=layers,
        hidden=hidden,
        ffn=m.size("feed_forward_length"),
        heads=heads,
        kv_heads=m.size("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocabulary=checkpoint.tensor(GGUF_NAMES["embed"]).shape[0],
        context=m.size("context_length"),
        eps=m.number("attention.layer_norm_rms_epsilon"),
        scale=1 / math.sqrt(query),
        window=m.size("attention.sliding_window"),
        full_layers=every_sixth(layers),
        local=rope.frequencies(m.number("rope.freq_base_swa", LOCAL_BASE), head_dim),
        full=rope.gguf_scaled(base, checkpoint, prefix),
        norm_offset=0.0,
        tied=GGUF_NAMES["head"] not in checkpoint.tensors,
    )


def _hf_ropes(m: Metadata, head_dim: int, name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(local, full) frequencies; transformers 5 nests both under `rope_parameters`."""
    nested = m.get("rope_parameters")
    if isinstance(nested, dict) and "full_attention" in nested:
        parts = []
        for kind, default in (("sliding_attention", LOCAL_BASE), ("full_attention", 1e6)):
            part = nested.get(kind)
            theta = part.get("rope_theta", default) if isinstance(part, dict) else default
            if not isinstance(theta, int | float) or theta <= 0:
                raise CheckpointError(f"{name}: rope_theta is {str(theta)[:40]}")
            parts.append(rope.scaled(rope.frequencies(float(theta), head_dim), part, name))
        return parts[0], parts[1]
    local = rope.frequencies(m.number("rope_local_base_freq", LOCAL_BASE), head_dim)
    full = rope.frequencies(llama.rope_theta(m, 1e6), head_dim)
    return local, rope.scaled(full, m.get("rope_scaling"), name)


def from_hf(checkpoint: Checkpoint) -> Config:
    m, name = Metadata(checkpoint), checkpoint.path.name
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if m.get(key) is not None:
            raise Unsupported(f"{name}: {key} is not supported")
    layers, head_dim = m.size("num_hidden_layers"), m.size("head_dim", 256)
    kinds = m.get("layer_types")
    full = every_sixth(layers)
    if isinstance(kinds, list) and len(kinds) == layers:
        full = frozenset(i for i, kind in enumerate(kinds) if kind == "full_attention")
    local_rope, full_rope = _hf_ropes(m, head_dim, name)
    return Config(
        layers=layers,
        hidden=m.size("hidden_size"),
        ffn=m.size("intermediate_size"),
        heads=m.size("num_attention_heads"),
        kv_heads=m.size("num_key_value_heads"),
        head_dim=head_dim,
        vocabulary=m.size("vocab_size"),
        context=m.size("max_position_embeddings", 32768),
        eps=m.number("rms_norm_eps", 1e-6),
        scale=m.number("query_pre_attn_scalar", 256.0) ** -0.5,
        window=m.size("sliding_window", 4096),
        full_layers=full,
        local=local_rope,
        full=full_rope,
        norm_offset=1.0,
        tied=HF_NAMES["head"] not in checkpoint.tensors,
    )


def _layer(b: Builder, c: Config, names: dict[str, str], i: int, x: Value) -> Value:
    def norm(y: Value, part: str, heads: int = 1) -> Value:
        return b.rms_norm(y, names[part], c.eps, heads, c.norm_offset)

    def linear(y: Value, part: str, width: int) -> Value:
        return b.linear(y, names[part] + ".weight", width)

    full = i in c.full_layers
    inverse = c.full if full else c.local
    y = norm(x, "attn_norm")
    q, k = (
        linear(y, "q", c.heads * c.head_dim),
        linear(y, "k", c.kv_heads * c.head_dim),
    )
    v = linear(y, "v", c.kv_heads * c.head_dim)
    q = b.rope(norm(q, "q_norm", c.heads), c.heads, inverse, False)
    k = b.rope(norm(k, "k_norm", c.kv_heads), c.kv_heads, inverse, False)
    a = b.attention(
        q, k, v, layer=i, heads=c.heads, kv_heads=c.kv_heads, scale=c.scale,
        window=0 if full else c.window,
    )  # fmt: skip
    x = b.add(x, norm(linear(a, "o", c.hidden), "attn_post"))
    y = norm(x, "ffn_norm")
    h = b.glu(linear(y, "gate", c.ffn), linear(y, "up", c.ffn), "gelu_tanh")
    return b.add(x, norm(linear(h, "down", c.hidden), "ffn_post"))


def build(checkpoint: Checkpoint) -> Program:
    """The forward pass of a Gemma 3 text checkpoint. Raises CheckpointError or Unsupported."""
    gguf = checkpoint.format == "gguf"
    c = from_gguf(checkpoint) if gguf else from_hf(checkpoint)
    if c.heads % c.kv_heads or c.head_dim % 2:
        raise CheckpointError(f"{checkpoint.path.name}: {c.heads} heads over {c.kv_heads} KV heads")
    names = GGUF_NAMES if gguf else HF_NAMES
    b = Builder(checkpoint)
    x = b.embed(names["embed"], c.vocabulary, c.hidden, math.sqrt(c.hidden))
    for i in range(c.layers):
        x = _layer(b, c, {k: v.format(i) for k, v in names.items()}, i, x)
    y = b.rms_norm(b.select_rows(x), names["norm"], c.eps, 1, c.norm_offset)
    b.linear(y, names["embed"] if c.tied else names["head"], c.vocabulary)
    return b.build(c.context)
