"""A program as launches on the device.

Linear layers leave sums of slices, which what reads them adds while loading: the residual
addition and the norm after it, rotation and KV write, the gate. What nothing of these reads becomes
a stream by `combine`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from octavo.backends.cuda.constants import slices
from octavo.backends.cuda.formats import MatrixSpec, form_of
from octavo.backends.cuda.launches import (
    Buffer,
    BufferKind,
    CacheRef,
    Columns,
    Given,
    Launch,
    MatrixRef,
    Numbers,
    ScratchRef,
    UnpackedRef,
    VectorRef,
    WorkRef,
)
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
    NormOp,
    RouteOp,
    SelectOp,
    SoftcapOp,
)
from octavo.backends.fusion import fuse
from octavo.errors import Unsupported
from octavo.program import Linear, Program, Value, Weight

WIDEST_HEAD = 256
_INDEX = {"ids": "ids", "positions": "positions", "token_type_ids": "types"}


class Sum(NamedTuple):
    """A value that is not added up yet: sums, what is added to them."""

    x: Columns
    bias: Weight | None = None
    residual: Buffer | None = None


@dataclass
class Launches:
    """A program's launches, the weights that they read, and where its results are.

    starts: the launch that each fused operation begins with, and their number.
    """

    program: Program
    matrices: list[MatrixSpec] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    results: dict[int, Buffer] = field(default_factory=dict)  # by value
    buffers: int = 0  # how many are numbered


class _Lowering:
    def __init__(self, program: Program) -> None:
        self.out = Launches(program)
        self._ops = fuse(program, WIDEST_HEAD)
        self._numbers: dict[tuple[str, ...], int] = {}
        self._sums: dict[int, Sum] = {}
        self._streams: dict[int, Buffer] = {}
        self._acts: dict[int, Buffer] = {}
        self._routes: dict[int, tuple[Buffer, Buffer]] = {}
        self._top_k: dict[int, int] = {}
        self._work: set[WorkRef] = set()
        self._op = 0

    def lower(self) -> Launches:
        p = self.out.program
        results = {v.id: v for v in (p.output, p.hidden, *p.taps)}
        for number, op in enumerate(self._ops):
            self._op = number
            self.out.starts.append(len(self.out.launches))
            self.place(op)
            for value in [v for v in results.values() if self.made(v)]:
                self.out.results[value.id] = self.stream(results.pop(value.id))
        self.out.starts.append(len(self.out.launches))
        if results:
            raise Unsupported(
                f"a program whose output, hidden states or taps are %{min(results)}, which are "
                "computed inside a fused operation"
            )
        return self.out

    def made(self, value: Value) -> bool:
        return value.id in self._sums or value.id in self._streams

    def emit(self, name: str, *args: Any, **options: Any) -> None:
        self.out.launches.append(Launch(name, args, options, self._op))

    def buffer(
        self, kind: BufferKind, like: Value, width: int | None = None,
        slices: int = 1, times: int = 1,
    ) -> Buffer:  # fmt: skip
        self.out.buffers += 1
        width = like.width if width is None else width
        return Buffer(self.out.buffers - 1, kind, like.selected, width, slices, times)

    def new_stream(self, value: Value) -> Buffer:
        self._streams[value.id] = self.buffer("stream", value)
        return self._streams[value.id]

    def new_act(self, value: Value | None) -> Buffer | None:
        if value is None:
            return None
        self._acts[value.id] = self.buffer("act", value)
        return self._acts[value.id]

    def matrix(self, *weights: Weight, experts: bool = False) -> MatrixRef:
        spec = MatrixSpec(tuple(w.tensor for w in weights), experts)
        if spec.key not in self._numbers:
            self._numbers[spec.key] = len(self.out.matrices)
            self.out.matrices.append(spec)
        return MatrixRef(self._numbers[spec.key])

    def sum(self, value: Value) -> Sum:
        """A value as what an operation adds up."""
        if value.id in self._sums:
            return self._sums[value.id]
        return Sum(Columns(self.stream(value), 0, value.width))

    def plain(self, value: Value) -> Sum:
        """Likewise, without a residual."""
        if self.sum(value).residual is not None:
            return Sum(Columns(self.stream(value), 0, value.width))
        return self.sum(value)

    def stream(self, value: Value) -> Buffer:
        """A value in fp32, added up if it is not yet."""
        if value.id not in self._streams:
            if value.id not in self._sums:
                raise Unsupported(f"%{value.id}, which is computed inside a fused operation")
            given = self._sums.pop(value.id)
            out = self.new_stream(value)
            self.emit(
                "combine", given.x, vector(given.bias), given.residual, out, None, cap=0.0
            )  # fmt: skip
        return self._streams[value.id]

    def act(self, value: Value) -> Buffer:
        """A value in bf16, as linear layers read it."""
        if value.id not in self._acts:
            given = self.sum(value)
            act = self.new_act(value)
            self.emit("combine", given.x, vector(given.bias), given.residual, None, act, cap=0.0)
        return self._acts[value.id]

    def place(self, op: FusedOp) -> None:
        match op:
            case EmbedOp() | FeaturesOp() | InjectOp():
                self.embedding(op)
            case SelectOp(select, act):
                out = self.new_stream(select.out)
                source = self.stream(select.x)
                self.emit("select", source, Given("select"), out, self.new_act(act))
            case NormOp() | LayerNormOp():
                self.norm(op)
            case AddOp(add):
                a, b, out = self.plain(add.a), self.stream(add.b), self.new_stream(add.out)
                self.emit("combine", a.x, vector(a.bias), b, out, None, cap=0.0)
            case SoftcapOp(cap):
                x, out = self.sum(cap.x), self.new_stream(cap.out)
                self.emit("combine", x.x, vector(x.bias), x.residual, out, None, cap=cap.cap)
            case EmitOp(x, from_act, order, act):
                if order is None:
                    self.act(x)
                else:
                    source = self._acts[x.id] if from_act else self.stream(x)
                    self.emit("permute", source, Numbers("i32", order), self.new_act(act))
            case LinearOp():
                for part, found in zip(
                    op.parts, self.linear([p.op for p in op.parts]), strict=True
                ):
                    residual = None if op.residual is None else self.stream(op.residual)
                    self._sums[part.out.id] = found._replace(residual=residual)
            case GatedOp(gate, up_, gated):
                both = self.linear([gate] if up_ is None else [gate, up_])
                self.glu(both[0], both[1] if up_ else None, gated.out, gated.activation)
            case GluOp(glu):
                self.glu(self.plain(glu.gate), self.plain(glu.up), glu.out, glu.activation)
            case AttentionOp():
                self.attention(op)
            case RouteOp() | ExpertsOp():
                self.experts(op)

    def embedding(self, op: EmbedOp | FeaturesOp | InjectOp) -> None:
        given, row = Given("embeddings"), Given("given")
        if isinstance(op, EmbedOp):
            e, out = op.op, self.new_stream(op.op.out)
            table, index = self.matrix(e.table), Given(_INDEX[e.index])
            self.emit("embed", table, index, out, scale=e.scale, offset=e.offset)
            if e.replaceable:
                self.emit("give", given, row, out, first=0, add=False)
        elif isinstance(op, FeaturesOp):
            self.emit("give", given, row, self.new_stream(op.op.out), first=0, add=False)
        else:
            x, out = self.plain(op.op.x), self.new_stream(op.op.out)
            self.emit("combine", x.x, vector(x.bias), None, out, None, cap=0.0)
            self.emit("give", given, row, out, first=op.op.first, add=True)

    def norm(self, op: NormOp | LayerNormOp) -> None:
        norm = op.op
        if isinstance(op, NormOp) and op.residual is not None:
            x, residual = self.plain(norm.x), self.stream(op.residual)
            assert op.out is not None
            self.emit(
                "norm_add", x.x, vector(x.bias), vector(norm.weight), residual,
                self.new_stream(op.out), eps=norm.eps,
            )  # fmt: skip
            return
        x = self.sum(norm.x)
        total = None
        if self._sums.pop(norm.x.id, None) is not None and self.read_later(norm.x):
            total = self.new_stream(norm.x)
        plain = op.out if isinstance(op, NormOp) else norm.out
        wanted = plain is not None and (self.read_later(plain) or op.act is None)
        written = self.new_stream(plain) if plain is not None and wanted else None
        given = (x.x, vector(x.bias), x.residual, vector(norm.weight))
        outs = (total, written, self.new_act(op.act))
        if isinstance(op, NormOp):
            self.emit("add_norm", *given, *outs, eps=norm.eps)
        else:
            self.emit("add_layer_norm", *given, vector(op.op.bias), *outs, eps=norm.eps)

    def read_later(self, value: Value) -> bool:
        """Whether a later operation, or who wants results, reads it in fp32."""
        p = self.out.program
        later = (v.id for op in self._ops[self._op + 1 :] for v in op.effects.reads)
        return value in (p.output, p.hidden, *p.taps) or value.id in later

    def linear(self, ops: list[Linear]) -> list[Sum]:
        """Projections of one input; those of one form are one matrix."""
        out: list[Sum] = []
        source = self.act(ops[0].x)
        for _, run in groupby(ops, key=lambda op: form_of(op.weight.tensor)):
            joined = list(run)
            ref = self.matrix(*(op.weight for op in joined))
            spec = self.out.matrices[ref.number]
            count = slices(spec.form.kind, spec.n, spec.k)
            buffer = self.buffer("sums", joined[0].out, spec.n, slices=count)
            coded = spec.form.kind != "bf16" and not source.selected
            unpacked = UnpackedRef(ref.number) if coded else None
            self.emit("linear", source, ref, buffer, unpacked)
            first = 0
            for op in joined:
                out.append(Sum(Columns(buffer, first, op.out.width), op.bias))
                first += op.out.width
        return out

    def glu(self, gate: Sum, up_: Sum | None, out: Value, activation: str) -> None:
        x, bias = (up_.x, vector(up_.bias)) if up_ else (None, None)
        act = self.new_act(out)
        self.emit("glu", gate.x, x, vector(gate.bias), bias, act, activation=activation)

    def attention(self, op: AttentionOp) -> None:
        a, rope, norm = op.op, op.rope, op.q_norm or op.k_norm
        if op.out != a.out:
            raise Unsupported("attention of selected rows alone")
        parts = [self.plain(value) for value in (op.q, op.k, a.v)]
        dim = a.q.width // a.heads
        frequencies = rope.frequencies if rope else ()
        axes = (rope.axes or (0,) * len(frequencies)) if rope else ()
        q, cache = self.buffer("query", a.q), CacheRef(a.layer)
        rows = Given("segment_rows" if a.segmented else "rows")
        self.emit(
            "rope_kv", *(s.x for s in parts), *(vector(s.bias) for s in parts),
            vector(op.q_norm.weight if op.q_norm else None),
            vector(op.k_norm.weight if op.k_norm else None),
            Numbers("f32", frequencies), Numbers("i32", axes), rows, q, cache, heads=a.heads,
            kv_heads=a.kv_heads, eps=norm.eps if norm else 0.0,
            factor=rope.factor if rope else 1.0, interleaved=bool(rope and rope.interleaved),
        )  # fmt: skip
        self.emit("copy_slots", cache, Given("pairs"))
        work = WorkRef(a.heads, a.kv_heads, a.window, a.segmented)
        if work not in self._work:
            self._work.add(work)
            self.emit("build_work", rows, work, heads=a.heads, kv_heads=a.kv_heads, window=a.window)
        self.emit(
            "attention", q, cache, rows, work, ScratchRef(a.heads, dim), vector(a.sinks),
            self.new_act(a.out), heads=a.heads, kv_heads=a.kv_heads, scale=a.scale,
            window=a.window, softcap=a.softcap,
        )  # fmt: skip

    def experts(self, op: RouteOp | ExpertsOp) -> None:
        if isinstance(op, RouteOp):
            r, x = op.op, self.plain(op.op.x)
            pair = self.buffer("ids", r.out, r.top_k), self.buffer("stream", r.out, r.top_k)
            self._routes[r.out.id], self._top_k[r.out.id] = pair, r.top_k
            self.emit("route", x.x, vector(x.bias), *pair, normalize=r.normalize)
            return
        e, k = op.op, self._top_k[op.op.routes.id]
        ids, weights = self._routes[e.routes.id]
        residual = None if op.residual is None else self.stream(op.residual)
        count, ffn = len(e.gate), e.gate[0].tensor.shape[0]
        order = self.buffer("order", e.out, count, times=k)
        owner = self.buffer("owner", e.out, count, times=k)
        self.emit("sort_pairs", ids, order, owner, experts=count)

        def projected(x: Buffer, weights: tuple[Weight, ...], width: int, choices: int) -> Buffer:
            made = self.buffer("stream", e.out, width, times=k)
            ref = self.matrix(*weights, experts=True)
            self.emit("expert_linear", x, ref, order, owner, made, choices=choices)
            return made

        source = self.act(e.x)
        gate, up_ = (projected(source, w, ffn, k) for w in (e.gate, e.up))
        biases = [vector(*each) for each in zip(*e.biases, strict=True)] or [None] * 3
        act = self.buffer("act", e.out, ffn, times=k)
        self.emit("expert_glu", gate, up_, ids, *biases[:2], act, activation=e.activation)
        down = projected(act, e.down, e.out.width, 1)
        out = self.new_stream(op.out)
        self.emit("expert_sum", down, ids, weights, biases[2], residual, out)


def vector(*weights: Weight | None) -> VectorRef | None:
    """Weights as a vector; None if there are none."""
    found = tuple(w for w in weights if w is not None)
    return VectorRef(found) if found else None


def lower(program: Program) -> Launches:
    """A program's launches. Raises Unsupported for a composition that cannot be placed."""
    return _Lowering(program).lower()
