"""A program with neighbouring operations fused, for backends to place.

Fusions: rotation, QK norm and selected rows into attention; projections of one input into one
operation; a gate into its two projections; a residual addition into the linear layer or norm that
feeds it. None changes an operation's arithmetic.
"""

from __future__ import annotations

from octavo.backends.fused import (
    AddOp,
    AttentionOp,
    EmbedOp,
    EmitOp,
    ExpertsOp,
    FeaturesOp,
    FusedOp,
    GatedOp,
    GluOp,
    InjectOp,
    LayerNormOp,
    LinearOp,
    LinearPart,
    NormOp,
    RouteOp,
    SelectOp,
    SoftcapOp,
)
from octavo.errors import Unsupported
from octavo.program import (
    Activate,
    Add,
    Attention,
    Embed,
    Experts,
    Features,
    Glu,
    Inject,
    LayerNorm,
    Linear,
    Op,
    Permute,
    Program,
    RmsNorm,
    Rope,
    Route,
    SelectRows,
    Softcap,
    Value,
)

# Operations that leave their result as an input of linear layers; some of them nowhere else.
EMITTING = (Attention, Glu, Activate, RmsNorm, LayerNorm, SelectRows, Permute)
EMITTING_ONLY = (Attention, Glu, Activate, Permute)


class _Fusion:
    def __init__(self, program: Program, widest_head: int) -> None:
        self.program, self.widest_head = program, widest_head
        self.producer = {op.out.id: op for op in program.ops}
        self.place = {value: i for i, value in enumerate(self.producer)}
        self.uses: dict[int, list[Op]] = {}
        for op in program.ops:
            for value in op.inputs:
                self.uses.setdefault(value.id, []).append(op)
        self.emitted: set[int] = set()
        self.folded: set[int] = set()  # ids of values that exist only inside a fused operation

    def sole_use(self, value: Value) -> bool:
        return len(self.uses.get(value.id, [])) == 1

    def peel(self, value: Value, heads: int) -> tuple[Value, RmsNorm | None, Rope | None]:
        """Walks back through rotation and per-head norm to the projection."""
        rope = norm = None
        op = self.producer[value.id]
        if isinstance(op, Rope) and self.sole_use(value):
            rope, value = op, op.x
            self.folded.add(op.out.id)
            op = self.producer[value.id]
        if isinstance(op, RmsNorm) and self.sole_use(value) and op.heads == heads:
            norm, value = op, op.x
            self.folded.add(op.out.id)
        return value, norm, rope

    def attention(self, op: Attention) -> AttentionOp:
        if op.q.width // op.heads > self.widest_head:
            raise Unsupported(f"attention heads wider than {self.widest_head} dimensions")
        q, q_norm, q_rope = self.peel(op.q, op.heads)
        k, k_norm, k_rope = self.peel(op.k, op.kv_heads)
        same = (q_rope is None) == (k_rope is None) and (
            q_rope is None or k_rope is None
            or (q_rope.frequencies, q_rope.factor, q_rope.interleaved, q_rope.axes)
            == (k_rope.frequencies, k_rope.factor, k_rope.interleaved, k_rope.axes)
        )  # fmt: skip
        if not same:
            raise Unsupported("attention whose queries and keys are rotated differently")
        out = op.out
        use = self.uses[out.id][0] if self.sole_use(out) else None
        if isinstance(use, SelectRows) and self.act(use.out):
            out = use.out
            self.folded.add(out.id)
        return AttentionOp(op, q, k, q_norm, k_norm, q_rope, out)

    def fused(self) -> list[FusedOp]:
        attentions = {
            op.out.id: self.attention(op) for op in self.program.ops if isinstance(op, Attention)
        }
        adds: dict[int, Add] = {}  # producer's value -> the addition folded into it
        for op in self.program.ops:
            if isinstance(op, Add) and (target := self.residual_target(op)) is not None:
                adds[target.id] = op
                self.folded.add(target.id)
        out: list[FusedOp] = []
        for op in self.program.ops:
            add = adds.get(op.out.id)
            match op:
                case Attention():
                    out.append(attentions[op.out.id])
                case Linear():
                    self.emit(op.x, out)
                    self.linear(op, add, out)
                case Permute():
                    from_act = isinstance(self.producer[op.x.id], EMITTING_ONLY)
                    out.append(EmitOp(op.x, from_act, op.order, op.out))
                case Route():
                    out.append(RouteOp(op))
                case Experts():
                    out.append(self.experts(op, add))
                case Softcap():
                    out.append(SoftcapOp(op))
                case Add():
                    if not any(folded is op for folded in adds.values()):
                        out.append(AddOp(op))
                case RmsNorm():
                    if op.out.id not in self.folded or add is not None:
                        out.append(self.norm(op, add))
                case LayerNorm():
                    out.append(LayerNormOp(op, self.act(op.out)))
                case Glu() | Activate():
                    self.gate(op, out)
                case Embed():
                    out.append(EmbedOp(op))
                case Features():
                    out.append(FeaturesOp(op))
                case Inject():
                    out.append(InjectOp(op))
                case SelectRows():
                    if op.out.id not in self.folded:
                        out.append(SelectOp(op, self.act(op.out)))
                case _ if op.out.id not in self.folded:
                    raise Unsupported(f"{op.name} where no backend can place it")
        return out

    def residual_target(self, op: Add) -> Value | None:
        """The addend whose producer can add the other one itself: computed last, used only here."""
        last = max(op.a, op.b, key=lambda value: self.place[value.id])
        producer = self.producer[last.id]
        fits = isinstance(producer, Linear | Experts) or (
            isinstance(producer, RmsNorm) and producer.heads == 1
        )
        return last if fits and self.sole_use(last) else None

    def emit(self, value: Value, out: list[FusedOp]) -> None:
        """Makes a value an input of linear layers if what computes it does not."""
        producer = self.producer[value.id]
        if not isinstance(producer, EMITTING) and value.id not in self.emitted:
            self.emitted.add(value.id)
            out.append(EmitOp(value, False, None, value))

    def experts(self, op: Experts, add: Add | None) -> ExpertsOp:
        if isinstance(self.producer[op.x.id], EMITTING_ONLY):
            raise Unsupported("experts that do not follow a norm")
        return ExpertsOp(op, op.out if add is None else add.out, _other(add, op.out))

    def linear(self, op: Linear, add: Add | None, out: list[FusedOp]) -> None:
        """Joins the linear layers before it that read the same input."""
        part = LinearPart(op, op.out if add is None else add.out)
        residual = _other(add, op.out)
        last = out[-1] if out else None
        joins = isinstance(last, LinearOp) and last.residual is None and last.source == op.x
        if residual is None and joins and isinstance(last, LinearOp):
            out[-1] = LinearOp((*last.parts, part), None)
        else:
            out.append(LinearOp((part,), residual))

    def act(self, value: Value) -> Value | None:
        """The value, if linear layers read it."""
        uses = self.uses.get(value.id, [])
        return value if any(isinstance(u, Linear) for u in uses) else None

    def gate(self, op: Glu | Activate, out: list[FusedOp]) -> None:
        """Joins the projections before it, which are nothing else's."""
        last = out[-1] if out else None
        if (
            isinstance(last, LinearOp)
            and last.effects.writes == op.inputs
            and last.residual is None
            and all(self.sole_use(v) for v in op.inputs)
        ):
            gate, *up = (part.op for part in last.parts)
            out[-1] = GatedOp(gate, up[0] if up else None, op)
        elif isinstance(op, Glu):
            out.append(GluOp(op))
        else:
            raise Unsupported("an activation that does not follow its own projections")

    def norm(self, op: RmsNorm, add: Add | None) -> NormOp:
        if op.heads != 1:
            raise Unsupported("a per-head norm outside attention")
        if add is not None:
            return NormOp(op, add.out, _other(add, op.out), None)
        linear = all(isinstance(u, Linear) for u in self.uses.get(op.out.id, []))
        if linear and op.out != self.program.hidden:
            return NormOp(op, None, None, op.out)
        return NormOp(op, op.out, None, self.act(op.out))


def _other(add: Add | None, value: Value) -> Value | None:
    """The other addend."""
    return None if add is None else add.a if add.b is value else add.b


def fuse(program: Program, widest_head: int) -> list[FusedOp]:
    """The fused operations in order. widest_head: features of an attention head, at most. Raises
    Unsupported for a composition that cannot be placed."""
    return _Fusion(program, widest_head).fused()
