"""Llama 2 and 3, SmolLM2, TinyLlama, Mistral: pre-norm, rotary GQA attention, SwiGLU."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError
from octavo.models import rope
from octavo.models.metadata import Metadata
from octavo.program import Builder, Program, Value

GGUF_NAMES = {
    "embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight",
    "attn_norm": "blk.{}.attn_norm.weight", "ffn_norm": "blk.{}.ffn_norm.weight",
    "q": "blk.{}.attn_q", "k": "blk.{}.attn_k", "v": "blk.{}.attn_v", "o": "blk.{}.attn_output",
    "gate": "blk.{}.ffn_gate", "up": "blk.{}.ffn_up", "down": "blk.{}.ffn_down",
}  # fmt: skip
HF_NAMES = {
    "embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj", "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj", "o": "model.layers.{}.self_attn.o_proj",
    "gate": "model.layers.{}.mlp.gate_proj", "up": "model.layers.{}.mlp.up_proj",
    "down": "model.layers.{}.mlp.down_proj",
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
    frequencies: tuple[float, ...]
    interleaved: bool  # the order of q and k rows in the checkpoint
    window: int
    tied: bool


def check_heads(config: Config, name: str) -> None:
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise CheckpointError(
            f"{name}: {config.heads} heads over {config.kv_heads} KV heads of {config.head_dim} "
            "dimensions is impossible"
        )


def from_gguf(checkpoint: Checkpoint) -> Config:
    prefix = checkpoint.architecture + "."
    m = Metadata(checkpoint, prefix)
    heads, hidden = m.size("attention.head_count"), m.size("embedding_length")
    head_dim = m.size("attention.key_length", max(1, hidden // heads))
    inverse = rope.frequencies(m.number("rope.freq_base", 10000.0), head_dim)
    return Config(
        layers=m.size("block_count"),
        hidden=hidden,
        ffn=m.size("feed_forward_length"),
        heads=heads,
        kv_heads=m.size("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocabulary=checkpoint.tensor(GGUF_NAMES["embed"]).shape[0],
        context=m.size("context_length"),
        eps=m.number("attention.layer_norm_rms_epsilon"),
        frequencies=rope.gguf_scaled(inverse, checkpoint, prefix),
        interleaved=True,
        window=m.size("attention.sliding_window", 0) if m.get("attention.sliding_window") else 0,
        tied=GGUF_NAMES["head"] not in checkpoint.tensors,
    )


def rope_theta(m: Metadata, default: float) -> float:
    parameters = m.get("rope_parameters")  # transformers 5; rope_theta before
    if isinstance(parameters, dict) and isinstance(parameters.get("rope_theta"), int | float):
        return float(parameters["rope_theta"])
    return m.number("rope_theta", default)


def from_hf(checkpoint: Checkpoint) -> Config:
    m = Metadata(checkpoint)
    heads, hidden = m.size("num_attention_heads"), m.size("hidden_size")
    head_dim = m.size("head_dim", max(1, hidden // heads))
    inverse = rope.frequencies(rope_theta(m, 10000.0), head_dim)
    scaling = m.get("rope_parameters") or m.get("rope_scaling")
    return Config(
        layers=m.size("num_hidden_layers"),
        hidden=hidden,
        ffn=m.size("intermediate_size"),
        heads=heads,
        kv_heads=m.size("num_key_value_heads", heads),
        head_dim=head_dim,
        vocabulary=m.size("vocab_size"),
        context=m.size("max_position_embeddings", 2048),
        eps=m.number("rms_norm_eps", 1e-6),
        frequencies=rope.scaled(inverse, scaling, checkpoint.path.name),
        interleaved=False,
        window=m.size("sliding_window", 0) if m.get("sliding_window") else 0,
        tied=HF_NAMES["head"] not in checkpoint.tensors,
    )


def _layer(b: Builder, c: Config, names: dict[str, str], i: int, x: Value) -> Value:
    def linear(y: Value, part: str, width: int) -> Value:
        bias = names[part] + ".bias"
        return b.linear(y, names[part] + ".weight", width, bias if b.has(bias) else None)

    y = b.rms_norm(x, names["attn_norm"], c.eps)
    q, k = linear(y, "q", c.heads * c.head_dim), linear(y, "k", c.kv_heads * c.head_dim)
    v = linear(y, "v", c.kv_heads * c.head_dim)
    q = b.rope(q, c.heads, c.frequencies, c.interleaved)
    k = b.rope(k, c.kv_heads, c.frequencies, c.interleaved)
    a = b.attention(
        q, k, v, layer=i, heads=c.heads, kv_heads=c.kv_heads,
        scale=1 / math.sqrt(c.head_dim), window=c.window,
    )  # fmt: skip
    x = b.add(x, linear(a, "o", c.hidden))
    y = b.rms_norm(x, names["ffn_norm"], c.eps)
    h = b.glu(linear(y, "gate", c.ffn), linear(y, "up", c.ffn), "silu")
    return b.add(x, linear(h, "down", c.hidden))


def build(checkpoint: Checkpoint) -> Program:
    """The forward pass of a llama checkpoint. Raises CheckpointError or Unsupported."""
    gguf = checkpoint.format == "gguf"
    c = from_gguf(checkpoint) if gguf else from_hf(checkpoint)
    check_heads(c, checkpoint.path.name)
    names = GGUF_NAMES if gguf else HF_NAMES
    b = Builder(checkpoint)
    x = b.embed(names["embed"], c.vocabulary, c.hidden)
    for i in range(c.layers):
        x = _layer(b, c, {k: v.format(i) for k, v in names.items()}, i, x)
    y = b.rms_norm(b.select_rows(x), names["norm"], c.eps)
    b.linear(y, names["embed"] if c.tied else names["head"], c.vocabulary)
    return b.build(c.context)
