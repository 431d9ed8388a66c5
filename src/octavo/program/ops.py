"""The operations. A value is a `[T, width]` array of floats; T, the tokens of the step, is known at
run time.

The meaning of each operation in plain arithmetic is `backends/torch/reference.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from octavo.checkpoint import Tensor

# swiglu_clamped: min(g, 7) sigmoid(1.702 min(g, 7)) * (clamp(u, -7, 7) + 1), gate g and up u
# quick_gelu: x sigmoid(1.702 x)
Activation = Literal["silu", "gelu_tanh", "gelu", "tanh", "relu", "swiglu_clamped", "quick_gelu"]
EmbedIndex = Literal["ids", "positions", "token_type_ids"]


@dataclass(frozen=True, slots=True)
class Value:
    """`[rows, width]`: rows are the step's tokens, or the selected ones after `SelectRows`."""

    id: int
    width: int
    selected: bool = False


@dataclass(frozen=True, slots=True)
class Weight:
    """A checkpoint tensor; `offset` is added to every element (Gemma's norms are 1 + w)."""

    tensor: Tensor
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Op:
    """An operation. It writes `out`; no other operation does."""

    out: Value

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The values it reads."""
        named = (getattr(self, f.name) for f in fields(self) if f.name != "out")
        return tuple(v for v in named if isinstance(v, Value))


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """out[t] = table[index[t] + offset] * scale; table is `[entries, width]`.

    index: the input that the table is looked up by. replaceable: rows that the step gives as
    `embeddings` take the place of the table's, with their first columns; they are not scaled.
    """

    table: Weight
    scale: float
    index: EmbedIndex = "ids"
    offset: int = 0
    replaceable: bool = False


@dataclass(frozen=True, slots=True)
class Features(Op):
    """out = the first columns of the step's `embeddings`, of every token: for programs without a
    table, such as those of images."""


@dataclass(frozen=True, slots=True)
class Inject(Op):
    """x + columns [first, first + width) of the step's `embeddings`, for the tokens that have some;
    x for the others."""

    x: Value
    first: int


@dataclass(frozen=True, slots=True)
class SelectRows(Op):
    """out = x[logits_indices]: the rows whose logits or states are needed."""

    x: Value


@dataclass(frozen=True, slots=True)
class RmsNorm(Op):
    """x / sqrt(mean(x^2) + eps) * weight, over each of `heads` equal slices of a row."""

    x: Value
    weight: Weight
    eps: float
    heads: int = 1


@dataclass(frozen=True, slots=True)
class LayerNorm(Op):
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, over a row."""

    x: Value
    weight: Weight
    bias: Weight
    eps: float


@dataclass(frozen=True, slots=True)
class Linear(Op):
    """x W^T + bias; W is `[out width, x width]`."""

    x: Value
    weight: Weight
    bias: Weight | None = None


@dataclass(frozen=True, slots=True)
class Rope(Op):
    """Rotary positions on every head: pair i turns by position * frequencies[i], times `factor`.

    Pairs are (i, i + n) for n frequencies, or (2i, 2i + 1) when interleaved (GGUF's llama row
    order). What a head has beyond its first 2n features passes unchanged. axes: pair i turns by
    coordinate axes[i] instead of the position, where the step gives coordinates.
    """

    x: Value
    heads: int
    frequencies: tuple[float, ...]
    interleaved: bool
    factor: float = 1.0
    axes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """Attention over the sequence's keys and values, which it stores in the cache of `layer`.

    Causal: a query sees keys up to its own position and as many more as `reach` says; in a tree
    those of its ancestors and its own.
    Otherwise it sees all of its sequence, which must be computed in one step; if `segmented`, those
    of its segment alone.

    Query head h uses key head h * kv_heads // heads. A window w > 0 limits a query at position p
    to keys in (p - w, p], or in (p - w, p + w) without causality. A softcap c > 0 turns scores s
    into c tanh(s / c). sinks: a score per head that takes its share of the softmax and has no
    value.
    """

    q: Value
    k: Value
    v: Value
    layer: int
    heads: int
    kv_heads: int
    scale: float
    window: int = 0
    causal: bool = True
    softcap: float = 0.0
    sinks: Weight | None = None
    segmented: bool = False


@dataclass(frozen=True, slots=True)
class Activate(Op):
    """activation(x)."""

    x: Value
    activation: Activation


@dataclass(frozen=True, slots=True)
class Glu(Op):
    """activation(gate) * up."""

    gate: Value
    up: Value
    activation: Activation


@dataclass(frozen=True, slots=True)
class Add(Op):
    """a + b."""

    a: Value
    b: Value


@dataclass(frozen=True, slots=True)
class Softcap(Op):
    """cap * tanh(x / cap)."""

    x: Value
    cap: float


@dataclass(frozen=True, slots=True)
class Permute(Op):
    """out[:, i] = x[:, order[i]]."""

    x: Value
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Route(Op):
    """softmax(x) with all but the `top_k` largest of a row set to 0, divided by what is left
    if `normalize`. Of equals the first is taken. x is `[T, experts]`."""

    x: Value
    top_k: int
    normalize: bool


@dataclass(frozen=True, slots=True)
class Experts(Op):
    """Sum over the experts e with routes[t, e] > 0, in ascending order, of
    routes[t, e] * ((activation(x gate_e^T) * (x up_e^T)) down_e^T), each product plus its bias if
    there are biases."""

    x: Value
    routes: Value
    gate: tuple[Weight, ...]
    up: tuple[Weight, ...]
    down: tuple[Weight, ...]
    activation: Activation
    biases: tuple[tuple[Weight, Weight, Weight], ...] = ()
