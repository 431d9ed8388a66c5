"""What decoders are made of. A family says which parts, in which order, under which names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError, Unsupported
from octavo.models import rotation
from octavo.models.activations import activation
from octavo.models.metadata import Metadata
from octavo.models.names import BIASES, GGUF_KEYS, GGUF_NAMES, HF_KEYS, HF_NAMES, Names, hf_names
from octavo.models.rope import Rotation
from octavo.models.shape import Experts, Norms, read_experts, read_shape
from octavo.program import Activation, Builder, Program, Value

SOFTMAX = 1  # GGUF's number of the usual way to weigh experts


class Decoder:
    """A program in the making, with a checkpoint's names, sizes and numbers at hand.

    names, keys: what this family's Hugging Face files call what is common to all.
    norm_offset: what is added to the weights of norms. eps: theirs, in a family that fixes it.
    """

    def __init__(
        self, checkpoint: Checkpoint, names: Mapping[str, str] | None = None,
        keys: Mapping[str, str] | None = None, *, norms: Norms = "rms", norm_offset: float = 0.0,
        eps: float | None = None,
    ) -> None:  # fmt: skip
        self.gguf = checkpoint.format == "gguf"
        self.checkpoint = checkpoint
        mine = HF_NAMES | dict(names or {})
        found = Names(GGUF_NAMES) if self.gguf else hf_names(mine, checkpoint.tensors)
        self.names, self.bare = found.parts, found.bare
        self.keys = GGUF_KEYS if self.gguf else HF_KEYS | dict(keys or {})
        self.meta = Metadata(checkpoint)
        self.b = Builder(checkpoint)
        self.norms, self.norm_offset = norms, norm_offset
        self.shape = read_shape(checkpoint, self.meta, self.keys, self.name("embed"), norms, eps)

    @cached_property
    def window(self) -> int:
        """How many tokens a sliding window has, 0 without one. Read by families that have them."""
        return self.meta.size(self.keys["window"]) if self.meta.get(self.keys["window"]) else 0

    @cached_property
    def moe(self) -> Experts:
        """The experts of a family that has them."""
        return read_experts(self.meta, self.keys, self.shape.ffn)

    # -- names --------------------------------------------------------------------------------

    def name(self, part: str, layer: int = 0) -> str:
        return self.names[part].format(layer)

    def has(self, part: str, layer: int = 0) -> bool:
        return part in self.names and self.b.has(self.name(part, layer) + ".weight")

    def gate_by(self, function: int) -> None:
        """Raises Unsupported if a GGUF file weighs experts in another way."""
        found = self.meta.get("expert_gating_func") if self.gguf else None
        if found not in (None, 0, function):
            raise Unsupported(f"{self.checkpoint.path.name}: expert_gating_func is {found}")

    def activation(self, default: Activation, key: str = "hidden_act") -> Activation:
        """What the folder's `key` names; GGUF files do not say."""
        return default if self.gguf else activation(self.checkpoint, key, self.meta.get(key))

    def rotation(
        self, context: int | None, kind: str | None = None, theta: str = "rope_theta",
        partial: bool = False,
    ) -> Rotation:  # fmt: skip
        """That of layers of a kind, or of all, for sequences up to `context` or the model's limit.

        theta: a folder's key of the base. partial: whether a part of a head is rotated.
        """
        sizes = self.shape.head_dim, context or self.shape.context
        if self.gguf:
            return rotation.from_gguf(self.checkpoint, self.meta, *sizes)
        name = self.checkpoint.path.name
        return rotation.from_hf(self.meta, name, *sizes, kind=kind, theta=theta, partial=partial)

    # -- parts --------------------------------------------------------------------------------

    def embed(self, scale: float = 1.0) -> Value:
        s = self.shape
        table = self.name("embed") + ".weight"
        return self.b.embed(table, s.vocabulary, s.hidden, scale, replaceable=True)

    def norm(self, x: Value, part: str, layer: int = 0, heads: int = 1) -> Value:
        name, eps = self.name(part, layer), self.shape.eps
        if self.norms == "layer":
            return self.b.layer_norm(x, name + ".weight", name + ".bias", eps)
        return self.b.rms_norm(x, name + ".weight", eps, heads, self.norm_offset)

    def linear(
        self, x: Value, part: str, width: int, layer: int = 0, rows: tuple[int, int] | None = None
    ) -> Value:
        """With a bias if the checkpoint says so, or has one; `rows` of a matrix of several."""
        name = self.name(part, layer)
        keys = filter(self.meta.knows, BIASES.get(part, ()))
        biased = next(map(self.meta.flag, keys), self.b.has(name + ".bias"))
        return self.b.linear(x, name + ".weight", width, name + ".bias" if biased else None, rows)

    def project(self, x: Value, layer: int) -> tuple[Value, Value, Value]:
        """Queries, keys and values, from three matrices or the thirds of one."""
        s = self.shape
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        if not self.has("qkv", layer):
            parts = (("q", q), ("k", kv), ("v", kv))
            a, b, c = (self.linear(x, part, width, layer) for part, width in parts)
        else:
            cuts = ((0, q), (q, q + kv), (q + kv, q + 2 * kv))
            a, b, c = (self.linear(x, "qkv", q + 2 * kv, layer, cut) for cut in cuts)
        return a, b, c

    def attention(
        self, x: Value, layer: int, rotation: Rotation | None, *, window: int = 0,
        qk_norm: Literal["none", "heads", "all"] = "none", scale: float | None = None,
        softcap: float = 0.0, sinks: str | None = None, causal: bool = True,
    ) -> Value:  # fmt: skip
        """The block up to and with the output projection. qk_norm: of each head, or of all."""
        s, b = self.shape, self.b
        q, k, v = self.project(x, layer)
        if qk_norm != "none":
            each = qk_norm == "heads"
            q = self.norm(q, "q_norm", layer, s.heads if each else 1)
            k = self.norm(k, "k_norm", layer, s.kv_heads if each else 1)
        if rotation is not None:
            r = rotation
            q = b.rope(q, s.heads, r.frequencies, r.interleaved, r.factor)
            k = b.rope(k, s.kv_heads, r.frequencies, r.interleaved, r.factor)
        a = b.attention(
            q, k, v, layer=layer, heads=s.heads, kv_heads=s.kv_heads,
            scale=s.head_dim**-0.5 if scale is None else scale, window=window, causal=causal,
            softcap=softcap, sinks=sinks,
        )  # fmt: skip
        return self.linear(a, "o", s.hidden, layer)

    def glu(self, x: Value, layer: int, activation: Activation) -> Value:
        """A gated feed-forward block, from three matrices or with gate and up in one."""
        n = self.shape.ffn
        if self.has("gate", layer):
            gate, up = self.linear(x, "gate", n, layer), self.linear(x, "up", n, layer)
        else:
            gate, up = (self.linear(x, "up", 2 * n, layer, cut) for cut in ((0, n), (n, 2 * n)))
        h = self.b.glu(gate, up, activation)
        return self.linear(h, "down", self.shape.hidden, layer)

    def mlp(self, x: Value, layer: int, activation: Activation) -> Value:
        """A feed-forward block without a gate."""
        h = self.b.activate(self.linear(x, "up", self.shape.ffn, layer), activation)
        return self.linear(h, "down", self.shape.hidden, layer)

    def experts(self, x: Value, layer: int, activation: Activation, normalize: bool) -> Value:
        e = self.moe
        routes = self.b.route(self.linear(x, "router", e.count, layer), e.used, normalize)
        names = self.name("gates", layer), self.name("ups", layer), self.name("downs", layer)
        return self.b.experts(x, routes, names, e.ffn, activation)

    def states(self, x: Value) -> Program:
        """Ends the program with the last norm's states of the selected rows, for embeddings."""
        self.meta.get("tie_word_embeddings")  # to what, there is no head
        y = self.norm(self.b.select_rows(x), "norm")
        return self.b.build(self.shape.context, y, task="embed")

    def build(self, x: Value, softcap: float = 0.0) -> Program:
        """Ends the program with the last norm and the logits of the selected rows."""
        return self.end(self.norm(self.b.select_rows(x), "norm"), softcap)

    def end(self, y: Value, softcap: float = 0.0) -> Program:
        """Ends the program with the logits of y; with y itself where there is no head: what a
        base class saves makes embeddings only."""
        head, tied = self.name("head"), self.gguf or self.meta.flag("tie_word_embeddings")
        if not tied and self.bare:
            return self.b.build(self.shape.context, y, task="embed")
        if not tied and not self.has("head"):
            raise CheckpointError(
                f"{self.checkpoint.path.name}: tensor {head + '.weight'!r} is missing, and the "
                "head is not tied to the embeddings (tie_word_embeddings is false)",
                "download the model's files again",
            )
        matrix = head if self.has("head") else self.name("embed")
        bias = head + ".bias" if self.b.has(head + ".bias") else None
        logits = self.b.linear(y, matrix + ".weight", self.shape.vocabulary, bias)
        if softcap:
            logits = self.b.softcap(logits, softcap)
        return self.b.build(self.shape.context, logits, hidden=y)
