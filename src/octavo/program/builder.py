"""Builds programs: one method per operation, which checks the shapes of its tensors."""

from __future__ import annotations

from octavo.checkpoint import Checkpoint, Tensor
from octavo.errors import CheckpointError, Unsupported
from octavo.program import inputs
from octavo.program.ops import (
    Activate,
    Activation,
    Add,
    Attention,
    Embed,
    EmbedIndex,
    Experts,
    Features,
    Glu,
    Inject,
    LayerNorm,
    Linear,
    Op,
    Permute,
    RmsNorm,
    Rope,
    Route,
    SelectRows,
    Softcap,
    Value,
    Weight,
)
from octavo.program.program import NO_CACHE, LayerCache, Program, Task


class Builder:
    """Appends operations to a program. Raises CheckpointError when a tensor has the wrong shape."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._ops: list[Op] = []
        self._permuted: dict[tuple[int, tuple[int, ...]], Value] = {}

    def has(self, name: str) -> bool:
        return name in self._checkpoint.tensors

    def _value(self, width: int, like: Value | None = None) -> Value:
        return Value(len(self._ops), width, like.selected if like else False)

    def _emit(self, op: Op) -> Value:
        self._ops.append(op)
        return op.out

    def _weight(self, name: str, shape: tuple[int, ...], offset: float = 0.0) -> Weight:
        return Weight(self._checkpoint.tensor(name, shape), offset)

    def embed(
        self, table: str, entries: int, width: int, scale: float = 1.0,
        index: EmbedIndex = "ids", offset: int = 0, replaceable: bool = False,
    ) -> Value:  # fmt: skip
        weight = self._weight(table, (entries, width))
        return self._emit(Embed(self._value(width), weight, scale, index, offset, replaceable))

    def features(self, width: int) -> Value:
        return self._emit(Features(self._value(width)))

    def inject(self, x: Value, first: int) -> Value:
        return self._emit(Inject(self._value(x.width, x), x, first))

    def select_rows(self, x: Value) -> Value:
        return self._emit(SelectRows(Value(len(self._ops), x.width, True), x))

    def rms_norm(
        self, x: Value, weight: str, eps: float, heads: int = 1, offset: float = 0.0
    ) -> Value:
        w = self._weight(weight, (x.width // heads,), offset)
        return self._emit(RmsNorm(self._value(x.width, x), x, w, eps, heads))

    def layer_norm(self, x: Value, weight: str, bias: str, eps: float) -> Value:
        w, b = self._weight(weight, (x.width,)), self._weight(bias, (x.width,))
        return self._emit(LayerNorm(self._value(x.width, x), x, w, b, eps))

    def linear(
        self, x: Value, weight: str, width: int, bias: str | None = None,
        rows: tuple[int, int] | None = None,
    ) -> Value:  # fmt: skip
        """rows: take `[begin, end)` of a matrix of `width` rows, and of its bias."""
        w = self._weight(weight, (width, x.width))
        b = self._weight(bias, (width,)) if bias else None
        if rows is not None:
            w = Weight(w.tensor.rows(*rows))
            b = Weight(b.tensor.rows(*rows)) if b else None
            width = rows[1] - rows[0]
        x = self._ordered(x, w.tensor)
        return self._emit(Linear(self._value(width, x), x, w, b))

    def _ordered(self, x: Value, tensor: Tensor) -> Value:
        """x with its features in the order of the tensor's columns (GPTQ with act-order)."""
        if tensor.order is None:
            return x
        key = (x.id, tensor.order)
        if key not in self._permuted:
            self._permuted[key] = self._emit(Permute(self._value(x.width, x), x, tensor.order))
        return self._permuted[key]

    def rope(
        self, x: Value, heads: int, frequencies: tuple[float, ...], interleaved: bool,
        factor: float = 1.0, axes: tuple[int, ...] = (),
    ) -> Value:  # fmt: skip
        out = self._value(x.width, x)
        return self._emit(Rope(out, x, heads, frequencies, interleaved, factor, axes))

    def attention(
        self, q: Value, k: Value, v: Value, *,
        layer: int, heads: int, kv_heads: int, scale: float, window: int = 0,
        causal: bool = True, softcap: float = 0.0, sinks: str | None = None,
        segmented: bool = False,
    ) -> Value:  # fmt: skip
        if segmented and (causal or window):
            raise ValueError("segments are for attention to both sides, without a window")
        out = self._value(q.width, q)
        sink = self._weight(sinks, (heads,)) if sinks else None
        return self._emit(
            Attention(
                out, q, k, v, layer, heads, kv_heads, scale, window, causal, softcap, sink,
                segmented,
            )
        )  # fmt: skip

    def softcap(self, x: Value, cap: float) -> Value:
        return self._emit(Softcap(self._value(x.width, x), x, cap))

    def route(self, x: Value, top_k: int, normalize: bool) -> Value:
        if not 1 <= top_k <= x.width:
            raise CheckpointError(f"{top_k} of {x.width} experts cannot be chosen")
        return self._emit(Route(self._value(x.width, x), x, top_k, normalize))

    def experts(
        self, x: Value, routes: Value, names: tuple[str, str, str], ffn: int,
        activation: Activation,
    ) -> Value:  # fmt: skip
        """names: of gate, up and down, each one tensor `[experts, ...]` or, with {} for the
        expert's number, a tensor per expert. Biases are used where the checkpoint has them."""
        n, count = x.width, routes.width
        shapes = ((ffn, n), (ffn, n), (n, ffn))
        pairs = list(zip(names, shapes, strict=True))
        gate, up, down = (self._stack(f"{name}.weight", count, shape) for name, shape in pairs)
        biases: tuple[tuple[Weight, Weight, Weight], ...] = ()
        if self.has(f"{names[0]}.bias".format(0)):
            a, b, c = (self._stack(f"{name}.bias", count, shape[:1]) for name, shape in pairs)
            biases = tuple(zip(a, b, c, strict=True))
        out = self._value(n, x)
        return self._emit(Experts(out, x, routes, gate, up, down, activation, biases))

    def _stack(self, name: str, count: int, shape: tuple[int, ...]) -> tuple[Weight, ...]:
        """A weight for each expert, from a tensor per expert or from one of all."""
        if "{}" in name:
            weights = [self._weight(name.format(e), shape) for e in range(count)]
        else:
            whole = self._checkpoint.tensor(name, (count, *shape))
            weights = [Weight(whole.part(e)) for e in range(count)]
        if any(w.tensor.order for w in weights):
            raise Unsupported("experts whose columns are permuted (GPTQ with act-order)")
        return tuple(weights)

    def activate(self, x: Value, activation: Activation) -> Value:
        return self._emit(Activate(self._value(x.width, x), x, activation))

    def glu(self, gate: Value, up: Value, activation: Activation) -> Value:
        return self._emit(Glu(self._value(gate.width, gate), gate, up, activation))

    def add(self, a: Value, b: Value) -> Value:
        return self._emit(Add(self._value(a.width, a), a, b))

    def build(
        self, context: int, output: Value, hidden: Value | None = None, task: Task = "generate",
        taps: tuple[Value, ...] = (),
    ) -> Program:  # fmt: skip
        """Ends the program; see Program. context: the most tokens of a sequence."""
        hidden = output if hidden is None else hidden
        if not output.selected or not hidden.selected:
            raise ValueError("output and hidden are of selected rows")
        tables = [op for op in self._ops if isinstance(op, Embed) and op.index == "ids"]
        vocabulary = tables[0].table.tensor.shape[0] if tables else 0
        return Program(
            tuple(self._ops),
            self._inputs(),
            vocabulary,
            context,
            self._cache(),
            output,
            hidden,
            task,
            taps,
        )

    def _cache(self) -> tuple[LayerCache, ...]:
        attentions = {op.layer: op for op in self._ops if isinstance(op, Attention)}
        if not attentions and not any(isinstance(op, Features) for op in self._ops):
            raise CheckpointError("the model has no layers")
        return tuple(
            LayerCache(op.kv_heads, op.k.width // op.kv_heads, op.window)
            if (op := attentions.get(layer)) is not None
            else NO_CACHE
            for layer in range(max(attentions, default=-1) + 1)
        )

    def _inputs(self) -> tuple[inputs.Input, ...]:
        """What the operations read: each input once."""
        found = [inputs.IDS]
        embeds = [op for op in self._ops if isinstance(op, Embed)]
        by = {op.index for op in embeds}
        if "positions" in by or any(isinstance(op, Rope) for op in self._ops):
            found.append(inputs.POSITIONS)
        axes = [axis + 1 for op in self._ops if isinstance(op, Rope) for axis in op.axes]
        if axes:
            found.append(inputs.coordinates(max(axes)))
        if any(op.segmented for op in self._ops if isinstance(op, Attention)):
            found.append(inputs.SEGMENTS)
        if "token_type_ids" in by:
            found.append(inputs.TOKEN_TYPE_IDS)
        replaceable = [op.out.width for op in embeds if op.replaceable]
        if len(replaceable) > 1:
            raise ValueError("the rows of one table only can be replaced")
        last = max((op.first + op.x.width for op in self._ops if isinstance(op, Inject)), default=0)
        found += [inputs.embeddings(max(width, last)) for width in replaceable]
        given = [op.out.width for op in self._ops if isinstance(op, Features)]
        if given:
            return (*found, *(inputs.features(max(width, last)) for width in given))
        if all(op.causal for op in self._ops if isinstance(op, Attention)):
            found += [inputs.PARENTS, inputs.REACH]
        return tuple(found)
