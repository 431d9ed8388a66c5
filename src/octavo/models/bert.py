"""BERT, RoBERTa and XLM-RoBERTa encoders: post-norm, learned positions, bidirectional attention.

With a classification head (cross-encoders, for reranking) the program's output is its scores,
otherwise the last layer's states of the selected tokens, to be pooled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from octavo.checkpoint import Checkpoint, Tensor
from octavo.errors import CheckpointError, Unsupported
from octavo.models.activations import activation
from octavo.models.metadata import Metadata
from octavo.program import Activation, Builder, Program, Value

# GGUF names of modules and keys, as Hugging Face has them.
GGUF_NAMES = {
    "token_embd": "embeddings.word_embeddings", "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings", "token_embd_norm": "embeddings.LayerNorm",
}  # fmt: skip
GGUF_LAYER_NAMES = {
    "attn_q": "attention.self.query", "attn_k": "attention.self.key",
    "attn_v": "attention.self.value", "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm", "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm",
}  # fmt: skip
GGUF_KEYS = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings", "attention.layer_norm_epsilon": "layer_norm_eps",
}  # fmt: skip


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of an encoder. positions: entries of the position table; first: that of position 0."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    vocabulary: int
    positions: int
    first: int
    types: int
    eps: float
    activation: Activation
    roberta: bool


def _config(checkpoint: Checkpoint) -> EncoderConfig:
    m = Metadata(checkpoint)
    roberta = checkpoint.architecture != "bert"
    for key, usual in (("position_embedding_type", "absolute"), ("is_decoder", False)):
        if m.get(key) not in (None, usual):
            raise Unsupported(f"{checkpoint.path.name}: {key} is {str(m.get(key))[:40]}")
    heads, hidden = m.size("num_attention_heads"), m.size("hidden_size")
    if hidden % heads:
        raise CheckpointError(f"{checkpoint.path.name}: {hidden} features over {heads} heads")
    padding = m.get("pad_token_id")
    return EncoderConfig(
        layers=m.size("num_hidden_layers"),
        hidden=hidden,
        ffn=m.size("intermediate_size"),
        heads=heads,
        vocabulary=m.size("vocab_size"),
        positions=m.size("max_position_embeddings"),
        first=(padding if isinstance(padding, int) else 1) + 1 if roberta else 0,
        types=m.size("type_vocab_size"),
        eps=m.number("layer_norm_eps"),
        activation=activation(checkpoint, "hidden_act", m.get("hidden_act")),
        roberta=roberta,
    )


def _embeddings(b: Builder, c: EncoderConfig, prefix: str) -> Value:
    e = prefix + "embeddings."
    x = b.embed(e + "word_embeddings.weight", c.vocabulary, c.hidden)
    p = b.embed(
        e + "position_embeddings.weight", c.positions, c.hidden, index="positions", offset=c.first
    )
    t = b.embed(e + "token_type_embeddings.weight", c.types, c.hidden, index="token_type_ids")
    x = b.add(b.add(x, t), p)
    return b.layer_norm(x, e + "LayerNorm.weight", e + "LayerNorm.bias", c.eps)


def _linear(b: Builder, x: Value, name: str, width: int) -> Value:
    return b.linear(x, name + ".weight", width, name + ".bias")


def _layer(b: Builder, c: EncoderConfig, name: str, i: int, x: Value) -> Value:
    def norm(y: Value, module: str) -> Value:
        return b.layer_norm(y, f"{module}.LayerNorm.weight", f"{module}.LayerNorm.bias", c.eps)

    q, k, v = (
        _linear(b, x, f"{name}attention.self.{p}", c.hidden) for p in ("query", "key", "value")
    )
    a = b.attention(
        q, k, v, layer=i, heads=c.heads, kv_heads=c.heads,
        scale=1 / math.sqrt(c.hidden // c.heads), causal=False,
    )  # fmt: skip
    a = _linear(b, a, name + "attention.output.dense", c.hidden)
    x = norm(b.add(x, a), name + "attention.output")
    h = b.activate(_linear(b, x, name + "intermediate.dense", c.ffn), c.activation)
    return norm(b.add(x, _linear(b, h, name + "output.dense", c.hidden)), name + "output")


def _as_folder(checkpoint: Checkpoint) -> Checkpoint:
    """A GGUF file with Hugging Face names. Raises Unsupported.

    For BERT only: RoBERTa files have the same architecture there and another vocabulary.
    """
    m, name = Metadata(checkpoint), checkpoint.path.name
    vocabulary = str(checkpoint.metadata.get("tokenizer.ggml.model"))
    if vocabulary != "bert" or m.get("attention.causal"):
        raise Unsupported(f"{name}: a decoder, or an encoder with a {vocabulary[:40]!r} vocabulary")
    config: dict[str, object] = {"model_type": "bert", "hidden_act": "gelu"}
    config |= {hf: m.get(gguf) for gguf, hf in GGUF_KEYS.items()}
    tensors: dict[str, Tensor] = {}
    for stored, tensor in checkpoint.tensors.items():
        module, _, kind = stored.rpartition(".")
        block, _, inner = module.removeprefix("blk.").partition(".")
        if module in GGUF_NAMES:
            tensors[f"{GGUF_NAMES[module]}.{kind}"] = tensor
        elif module.startswith("blk.") and inner in GGUF_LAYER_NAMES:
            tensors[f"encoder.layer.{block}.{GGUF_LAYER_NAMES[inner]}.{kind}"] = tensor
        else:
            raise Unsupported(f"{name}: tensor {stored[:60]!r}")
    for key, table in (("vocab_size", "word"), ("type_vocab_size", "token_type")):
        found = tensors.get(f"embeddings.{table}_embeddings.weight")
        config[key] = found.shape[0] if found is not None else None
    return replace(checkpoint, format="hf", metadata=config, tensors=tensors)


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of an encoder. Raises CheckpointError or Unsupported."""
    if checkpoint.format == "gguf":
        checkpoint = _as_folder(checkpoint)
    c = _config(checkpoint)
    b = Builder(checkpoint)
    prefix = next(
        (p for p in ("bert.", "roberta.") if b.has(p + "embeddings.word_embeddings.weight")), ""
    )
    x = _embeddings(b, c, prefix)
    for i in range(c.layers):
        x = _layer(b, c, f"{prefix}encoder.layer.{i}.", i, x)
    x = b.select_rows(x)
    head = ("classifier.dense", "classifier.out_proj") if c.roberta else (
        prefix + "pooler.dense", "classifier"
    )  # fmt: skip
    context = c.positions - c.first
    if not b.has(head[1] + ".weight"):
        return b.build(context, x, task="embed")
    labels = checkpoint.tensor(head[1] + ".weight").shape[0]
    if labels != 1:
        raise Unsupported(
            f"{checkpoint.path.name}: a classifier of {labels} labels   ({head[1]}.weight)",
            "cross-encoders with one label rank; a model that embeds has no classifier",
        )
    pooled = b.activate(_linear(b, x, head[0], c.hidden), "tanh")
    return b.build(context, _linear(b, pooled, head[1], labels), task="rank")
