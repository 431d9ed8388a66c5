"""BERT, RoBERTa and XLM-RoBERTa encoders: post-norm, learned positions, attention to both sides.

With a classification head (cross-encoders, for reranking) the program's result is its scores,
otherwise the last states of the selected tokens, to be pooled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError, Unsupported
from octavo.models.activations import activation
from octavo.models.metadata import Metadata
from octavo.program import Activation, Builder, Program, Value


@dataclass(frozen=True)
class Config:
    layers: int
    hidden: int
    ffn: int
    heads: int
    vocabulary: int
    positions: int  # entries of the position table
    first: int  # of which this is the first one used
    types: int
    eps: float
    activation: Activation
    roberta: bool


def _config(checkpoint: Checkpoint) -> Config:
    m = Metadata(checkpoint)
    roberta = checkpoint.architecture != "bert"
    for key, usual in (("position_embedding_type", "absolute"), ("is_decoder", False)):
        if m.get(key) not in (None, usual):
            raise Unsupported(f"{checkpoint.path.name}: {key} is {str(m.get(key))[:40]}")
    heads, hidden = m.size("num_attention_heads"), m.size("hidden_size")
    if hidden % heads:
        raise CheckpointError(f"{checkpoint.path.name}: {hidden} features over {heads} heads")
    padding = m.get("pad_token_id")
    return Config(
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


def _embeddings(b: Builder, c: Config, prefix: str) -> Value:
    e = prefix + "embeddings."
    x = b.embed(e + "word_embeddings.weight", c.vocabulary, c.hidden)
    p = b.embed(
        e + "position_embeddings.weight", c.positions, c.hidden, index="positions", offset=c.first
    )
    t = b.embed(e + "token_type_embeddings.weight", c.types, c.hidden, index="types")
    x = b.add(b.add(x, t), p)
    return b.layer_norm(x, e + "LayerNorm.weight", e + "LayerNorm.bias", c.eps)


def _linear(b: Builder, x: Value, name: str, width: int) -> Value:
    return b.linear(x, name + ".weight", width, name + ".bias")


def _layer(b: Builder, c: Config, name: str, i: int, x: Value) -> Value:
    def norm(y: Value, part: str) -> Value:
        return b.layer_norm(y, f"{part}.LayerNorm.weight", f"{part}.LayerNorm.bias", c.eps)

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


def build(checkpoint: Checkpoint, context: int | None = None) -> Program:
    """The forward pass of an encoder. Raises CheckpointError or Unsupported."""
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
        return b.build(context, "embed")
    labels = checkpoint.tensor(head[1] + ".weight").shape[0]
    if labels != 1:
        raise Unsupported(
            f"{checkpoint.path.name}: a classifier of {labels} labels   ({head[1]}.weight)",
            "cross-encoders with one label rank; a model that embeds has no classifier",
        )
    pooled = b.activate(_linear(b, x, head[0], c.hidden), "tanh")
    _linear(b, pooled, head[1], labels)
    return b.build(context, "rank")
