"""What decoders are made of. A family says which parts, in which order, under which names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError, Unsupported
from octavo.models import rope
from octavo.models.metadata import Metadata
from octavo.models.names import GGUF_KEYS, GGUF_NAMES, HF_KEYS, HF_NAMES
from octavo.models.rope import Rotation
from octavo.program import Activation, Builder, Program, Value

Norms = Literal["rms", "layer"]
WIDEST_HEAD = 4096  # dimensions; a damaged file may claim anything


@dataclass(frozen=True)
class Shape:
    """The sizes every decoder has. experts: 0 in a dense model."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    eps: float
    window: int
    experts: int
    experts_used: int
    expert_ffn: int


class Decoder:
    """A program in the making, with a checkpoint's names, sizes and numbers at hand.

    names, keys: what this family's Hugging Face files call what is common to all.
    norm_offset: what is added to the weights of norms. eps: theirs, where a folder does not say.
    """

    def __init__(
        self, checkpoint: Checkpoint, names: Mapping[str, str] | None = None,
        keys: Mapping[str, str] | None = None, *, norms: Norms = "rms", norm_offset: float = 0.0,
        eps: float = 1e-6,
    ) -> None:  # fmt: skip
        self.gguf = checkpoint.format == "gguf"
        self.checkpoint = checkpoint
        self.names = GGUF_NAMES if self.gguf else HF_NAMES | dict(names or {})
        self.keys = GGUF_KEYS if self.gguf else HF_KEYS | dict(keys or {})
        self.meta = Metadata(checkpoint, f"{checkpoint.architecture}." if self.gguf else "")
        self.b = Builder(checkpoint)
        self.norms, self.norm_offset = norms, norm_offset
        self.shape = self._read_shape(eps)

    def _read_shape(self, default_eps: float) -> Shape:
        def size(part: str, default: int | None = None) -> int:
            return self.meta.size(self.keys[part], default)

        def optional(*parts: str) -> int:
            return next((size(p) for p in parts if self.meta.get(self.keys[p])), 0)

        heads, hidden = size("heads"), size("hidden")
        kv_heads, head_dim = size("kv_heads", heads), size("head_dim", max(1, hidden // heads))
        if heads % kv_heads or head_dim > WIDEST_HEAD:
            raise CheckpointError(
                f"{self.checkpoint.path.name}: {heads} heads over {kv_heads} KV heads of "
                f"{head_dim} dimensions is impossible"
            )
        if (layers := size("layers")) > (held := len(self.checkpoint.tensors)):
            raise CheckpointError(f"{self.checkpoint.path.name}: {layers} layers, {held} tensors")
        table = self.names["embed"] + ".weight"
        vocabulary = self.checkpoint.tensor(table).shape[0] if self.gguf else size("vocabulary")
        key = self.keys["eps" if self.norms == "rms" else "layer_norm_eps"]
        eps = self.meta.number(key, None if self.gguf else default_eps)
        ffn = size("ffn", 4 * hidden)
        return Shape(
            layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads,
            head_dim=head_dim, vocabulary=vocabulary, context=size("context"), eps=eps,
            window=optional("window"), experts=optional("experts", "local_experts"),
            experts_used=optional("experts_used"), expert_ffn=size("expert_ffn", ffn),
        )  # fmt: skip

    # -- names --------------------------------------------------------------------------------

    def name(self, part: str, layer: int = 0) -> str:
        return self.names[part].format(layer)

    def has(self, part: str, layer: int = 0) -> bool:
        return part in self.names and self.b.has(self.name(part, layer) + ".weight")

    def refuse(self, *keys: str) -> None:
        """Raises Unsupported if the checkpoint gives one of these a value."""
        for key in keys:
            if self.meta.get(key):
                raise Unsupported(f"{self.checkpoint.path.name}: {key}")

    def rotation(
        self, context: int | None, base: float = 10000.0, kind: str = "full_attention"
    ) -> Rotation:
        """That of layers of a kind, for sequences up to `context` or the model's limit."""
        sizes = self.shape.head_dim, context or self.shape.context
        if self.gguf:
            return rope.from_gguf(self.checkpoint, *sizes, base)
        return rope.from_hf(self.checkpoint, *sizes, base, kind)

    # -- parts --------------------------------------------------------------------------------

    def embed(self, scale: float = 1.0) -> Value:
        s = self.shape
        return self.b.embed(self.name("embed") + ".weight", s.vocabulary, s.hidden, scale)

    def norm(self, x: Value, part: str, layer: int = 0, heads: int = 1) -> Value:
        name, eps = self.name(part, layer), self.shape.eps
        if self.norms == "layer":
            return self.b.layer_norm(x, name + ".weight", name + ".bias", eps)
        return self.b.rms_norm(x, name + ".weight", eps, heads, self.norm_offset)

    def linear(
        self, x: Value, part: str, width: int, layer: int = 0, rows: tuple[int, int] | None = None
    ) -> Value:
        """With a bias where the checkpoint has one; `rows` of a matrix that holds several."""
        name = self.name(part, layer)
        bias = name + ".bias"
        return self.b.linear(x, name + ".weight", width, bias if self.b.has(bias) else None, rows)

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
        softcap: float = 0.0, sinks: str | None = None,
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
            scale=s.head_dim**-0.5 if scale is None else scale, window=window, softcap=softcap,
            sinks=sinks,
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
        s = self.shape
        routes = self.b.route(self.linear(x, "router", s.experts, layer), s.experts_used, normalize)
        names = self.name("gates", layer), self.name("ups", layer), self.name("downs", layer)
        return self.b.experts(x, routes, names, s.expert_ffn, activation)

    def head(self, x: Value, softcap: float = 0.0) -> None:
        """The last norm and the logits of the selected rows."""
        y = self.norm(self.b.select_rows(x), "norm")
        self.logits(y, softcap)

    def logits(self, y: Value, softcap: float = 0.0) -> None:
        part = "head" if self.has("head") else "embed"
        y = self.linear(y, part, self.shape.vocabulary)
        if softcap:
            self.b.softcap(y, softcap)

    def build(self) -> Program:
        return self.b.build(self.shape.context)
