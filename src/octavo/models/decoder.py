"""Builds decoders: one method per module of a layer. A family calls them in its order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError, Unsupported
from octavo.models import rotation
from octavo.models.activations import activation
from octavo.models.config import ExpertsConfig, Norms, read_config, read_experts
from octavo.models.metadata import Metadata
from octavo.models.names import BIASES, GGUF_KEYS, GGUF_NAMES, HF_KEYS, HF_NAMES, Names, hf_names
from octavo.models.rope import Rotation
from octavo.program import Activation, Builder, Program, Value

SOFTMAX = 1  # GGUF's expert_gating_func of a softmax over all experts


class Decoder:
    """Builds a program from a checkpoint.

    names, keys: this family's Hugging Face names of modules and configuration keys, where they
    differ from HF_NAMES and HF_KEYS. norm_offset: added to the weights of norms. eps: of norms, in
    a family whose configuration does not say.
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
        self.names, self.bare = found.modules, found.bare
        self.keys = GGUF_KEYS if self.gguf else HF_KEYS | dict(keys or {})
        self.meta = Metadata(checkpoint)
        self.b = Builder(checkpoint)
        self.norms, self.norm_offset = norms, norm_offset
        self.config = read_config(checkpoint, self.meta, self.keys, self.name("embed"), norms, eps)

    @cached_property
    def window(self) -> int:
        """Tokens of a sliding window, 0 without one. Read by families that have windows."""
        return self.meta.size(self.keys["window"]) if self.meta.get(self.keys["window"]) else 0

    @cached_property
    def moe(self) -> ExpertsConfig:
        """Sizes of the experts. Read by families that have experts."""
        return read_experts(self.meta, self.keys, self.config.ffn)

    # -- names --------------------------------------------------------------------------------

    def name(self, module: str, layer: int = 0) -> str:
        """What the checkpoint calls a module, such as "q" or "attn_norm" (names.py)."""
        return self.names[module].format(layer)

    def has(self, module: str, layer: int = 0) -> bool:
        """True if the checkpoint has weights for a module."""
        return module in self.names and self.b.has(self.name(module, layer) + ".weight")

    def gate_by(self, function: int) -> None:
        """Raises Unsupported if a GGUF file's expert_gating_func is another than `function`."""
        found = self.meta.get("expert_gating_func") if self.gguf else None
        if found not in (None, 0, function):
            raise Unsupported(f"{self.checkpoint.path.name}: expert_gating_func is {found}")

    def activation(self, default: Activation, key: str = "hidden_act") -> Activation:
        """The activation that config.json's `key` names. GGUF files do not say: `default`."""
        return default if self.gguf else activation(self.checkpoint, key, self.meta.get(key))

    def rotation(
        self, context: int | None, kind: str | None = None, theta: str = "rope_theta",
        partial: bool = False,
    ) -> Rotation:  # fmt: skip
        """The rotary embedding of layers of `kind`, or of all layers, for sequences of up to
        `context` tokens or the model's limit.

        theta: config.json's key of the base. partial: whether heads may be rotated in part.
        """
        sizes = self.config.head_dim, context or self.config.context
        if self.gguf:
            return rotation.from_gguf(self.checkpoint, self.meta, *sizes)
        name = self.checkpoint.path.name
        return rotation.from_hf(self.meta, name, *sizes, kind=kind, theta=theta, partial=partial)

    # -- modules ------------------------------------------------------------------------------

    def embed(self, scale: float = 1.0) -> Value:
        s = self.config
        table = self.name("embed") + ".weight"
        return self.b.embed(table, s.vocabulary, s.hidden, scale, replaceable=True)

    def norm(self, x: Value, module: str, layer: int = 0, heads: int = 1) -> Value:
        """The norm of a row, or of each of `heads` equal slices of it."""
        name, eps = self.name(module, layer), self.config.eps
        if self.norms == "layer":
            return self.b.layer_norm(x, name + ".weight", name + ".bias", eps)
        return self.b.rms_norm(x, name + ".weight", eps, heads, self.norm_offset)

    def linear(
        self, x: Value, module: str, width: int, layer: int = 0, rows: tuple[int, int] | None = None
    ) -> Value:
        """A linear layer, with a bias if the configuration says so or the checkpoint has one.
        rows: `[begin, end)` of the matrix, if it is several layers in one."""
        name = self.name(module, layer)
        keys = filter(self.meta.knows, BIASES.get(module, ()))
        biased = next(map(self.meta.flag, keys), self.b.has(name + ".bias"))
        return self.b.linear(x, name + ".weight", width, name + ".bias" if biased else None, rows)

    def project(self, x: Value, layer: int) -> tuple[Value, Value, Value]:
        """Queries, keys and values, from three matrices or from one that holds all three."""
        s = self.config
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        if not self.has("qkv", layer):
            modules = (("q", q), ("k", kv), ("v", kv))
            a, b, c = (self.linear(x, module, width, layer) for module, width in modules)
        else:
            cuts = ((0, q), (q, q + kv), (q + kv, q + 2 * kv))
            a, b, c = (self.linear(x, "qkv", q + 2 * kv, layer, cut) for cut in cuts)
        return a, b, c

    def attention(
        self, x: Value, layer: int, rotation: Rotation | None, *, window: int = 0,
        qk_norm: Literal["none", "heads", "all"] = "none", scale: float | None = None,
        softcap: float = 0.0, sinks: str | None = None, causal: bool = True,
    ) -> Value:  # fmt: skip
        """An attention block, output projection included. qk_norm: whether queries and keys are
        normalised, each head by itself or all as one row. rotation: None for no rotation."""
        s, b = self.config, self.b
        q, k, v = self.project(x, layer)
        if qk_norm != "none":
            each = qk_norm == "heads"
            q = self.norm(q, "q_norm", layer, s.heads if each else 1)
            k = self.norm(k, "k_norm", layer, s.kv_heads if each else 1)
        if rotation is not None:
            r = rotation
            q = b.rope(q, s.heads, r.frequencies, r.interleaved, r.factor, r.axes)
            k = b.rope(k, s.kv_heads, r.frequencies, r.interleaved, r.factor, r.axes)
        a = b.attention(
            q, k, v, layer=layer, heads=s.heads, kv_heads=s.kv_heads,
            scale=s.head_dim**-0.5 if scale is None else scale, window=window, causal=causal,
            softcap=softcap, sinks=sinks,
        )  # fmt: skip
        return self.linear(a, "o", s.hidden, layer)

    def glu(self, x: Value, layer: int, activation: Activation) -> Value:
        """A gated feed-forward block; gate and up may be one matrix."""
        n = self.config.ffn
        if self.has("gate", layer):
            gate, up = self.linear(x, "gate", n, layer), self.linear(x, "up", n, layer)
        else:
            gate, up = (self.linear(x, "up", 2 * n, layer, cut) for cut in ((0, n), (n, 2 * n)))
        h = self.b.glu(gate, up, activation)
        return self.linear(h, "down", self.config.hidden, layer)

    def mlp(self, x: Value, layer: int, activation: Activation) -> Value:
        """A feed-forward block: up projection, activation, down projection."""
        h = self.b.activate(self.linear(x, "up", self.config.ffn, layer), activation)
        return self.linear(h, "down", self.config.hidden, layer)

    def experts(self, x: Value, layer: int, activation: Activation, normalize: bool) -> Value:
        """A mixture of experts. normalize: scale the chosen experts' weights to sum to 1."""
        e = self.moe
        routes = self.b.route(self.linear(x, "router", e.count, layer), e.used, normalize)
        names = self.name("gates", layer), self.name("ups", layer), self.name("downs", layer)
        return self.b.experts(x, routes, names, e.ffn, activation)

    def states(self, x: Value) -> Program:
        """Ends the program with the final norm's states of the selected rows, to be pooled."""
        self.meta.get("tie_word_embeddings")  # read, though there is no head
        y = self.norm(self.b.select_rows(x), "norm")
        return self.b.build(self.config.context, y, task="embed")

    def build(self, x: Value, softcap: float = 0.0) -> Program:
        """Ends the program with the final norm and the logits of the selected rows."""
        return self.end(self.norm(self.b.select_rows(x), "norm"), softcap)

    def end(self, y: Value, softcap: float = 0.0) -> Program:
        """Ends the program with the logits of y, or with y itself where the checkpoint was saved
        from a base class, which has no head."""
        head, tied = self.name("head"), self.gguf or self.meta.flag("tie_word_embeddings")
        if not tied and self.bare:
            return self.b.build(self.config.context, y, task="embed")
        if not tied and not self.has("head"):
            raise CheckpointError(
                f"{self.checkpoint.path.name}: tensor {head + '.weight'!r} is missing, and the "
                "head is not tied to the embeddings (tie_word_embeddings is false)",
                "download the model's files again",
            )
        matrix = head if self.has("head") else self.name("embed")
        bias = head + ".bias" if self.b.has(head + ".bias") else None
        logits = self.b.linear(y, matrix + ".weight", self.config.vocabulary, bias)
        if softcap:
            logits = self.b.softcap(logits, softcap)
        return self.b.build(self.config.context, logits, hidden=y)
