"""A program: operations in order, what they take, what they keep, and which values they give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.program.inputs import Input
from octavo.program.ops import Attention, Op, Value

Task = Literal["generate", "embed", "rank"]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What a layer's KV cache holds per token: `kv_heads` keys of `head_dim`, and as many values.

    window: only the last so many tokens are ever read; 0: all of them. Without heads the layer
    keeps nothing.
    """

    kv_heads: int
    head_dim: int
    window: int = 0


NO_CACHE = LayerCache(0, 0)


@dataclass(frozen=True)
class Program:
    """Operations in order.

    inputs: what a step gives. cache: what each layer keeps, by number. output: the logits
    (generate), the states to pool (embed) or the scores (rank). hidden: the states that the
    logits are made of, for pooling generating models; elsewhere the output. taps: further values
    that are read after a step. kv_dtype: what the checkpoint wants keys and values cached as,
    "auto" if it does not say.
    """

    ops: tuple[Op, ...]
    inputs: tuple[Input, ...]
    vocabulary: int
    context: int
    cache: tuple[LayerCache, ...]
    output: Value
    hidden: Value
    task: Task = "generate"
    taps: tuple[Value, ...] = ()
    kv_dtype: str = "auto"

    @property
    def causal(self) -> bool:
        """True if no token sees later ones; otherwise a sequence is computed in one step."""
        return all(op.causal for op in self.ops if isinstance(op, Attention))

    def takes(self, name: str) -> bool:
        """True if a step may give the input `name`."""
        return any(declared.name == name for declared in self.inputs)
