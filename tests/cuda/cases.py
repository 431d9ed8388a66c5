"""Calls of every operation in the shapes of models, on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from octavo.backends.cuda import kernels
from octavo.backends.cuda.constants import PARTIAL_TOKENS, UNPACKED_TOKENS, slices, up
from octavo.backends.cuda.tensors import Matrix, StepRows, Work

# kind, columns of a scale, whether codes have minima
FORMATS = [
    ("bf16", 0, False), ("int4", 32, False), ("int4", 32, True), ("int4", 16, True),
    ("int8", 32, False), ("int8", 16, False), ("int8", 32, True), ("table4", 32, False),
    ("fp8", 128, False),
]  # fmt: skip


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int32)


def act(rows: int, width: int) -> Tensor:
    return empty(rows, up(width), dtype=torch.bfloat16)


def matrix(kind: str, group: int, minima: bool, n: int, k: int, experts: int = 0) -> Matrix:
    lead = (experts,) if experts else ()
    if kind == "bf16":
        return Matrix(kind, n, k, 0, empty(*lead, up(n), up(k), dtype=torch.bfloat16))
    width = 32 if kind in ("int4", "table4") else 64
    codes = empty(*lead, up(n) // 64, up(k) // 64, 64, width, dtype=torch.uint8)
    scales = empty(*lead, -(-up(k) // group), up(n), dtype=torch.float16)
    table = empty(16) if kind == "table4" else None
    return Matrix(kind, n, k, group, codes, scales, scales if minima else None, table)


def step_rows(tokens: int) -> StepRows:
    return StepRows(*(ints(tokens) for _ in range(8)), ints(1, tokens), ints(256))


def linears() -> Iterator[tuple[str, Callable[[], None]]]:
    def call(kind: str, group: int, minima: bool, tokens: int, n: int = 4096) -> None:
        w = matrix(kind, group, minima, n, 4096)
        parts = slices(kind, w.n, w.k) if tokens <= PARTIAL_TOKENS else 1
        coded = kind != "bf16" and tokens >= UNPACKED_TOKENS
        unpacked = empty(n, w.k, dtype=torch.bfloat16) if coded else None
        kernels.linear(act(tokens, w.k), w, empty(parts, tokens, w.n), unpacked)

    few = [
        (f, t)
        for f in FORMATS
        for t in ((1, 64, 96, 256, 2048) if f in FORMATS[:2] else (1, 256, 512))
    ]
    for (kind, group, minima), tokens in few:
        name = f"linear {kind}/{group}{'+' * minima} {tokens}"
        yield name, lambda a=(kind, group, minima, tokens): call(*a)
    for n, tokens in [(1024, 128), (4096, 128), (4096, 512)]:  # tiles of other sizes
        yield f"linear of {n} {tokens}", lambda a=(n, tokens): call("bf16", 0, False, a[1], a[0])
    codes = matrix("int4", 32, False, 4096, 4096)
    yield "linear codes 512", lambda: kernels.linear(act(512, 4096), codes, empty(1, 512, 4096))
    odd = empty(2048, 4100, dtype=torch.bfloat16)[:, :4096]  # rows that no descriptor can read
    plain = matrix("bf16", 0, False, 4096, 4096)
    yield "linear odd rows", lambda: kernels.linear(odd, plain, empty(1, 2048, 4096))
    wide = matrix("bf16", 0, False, 32768, 2048)
    yield "linear one slice", lambda: kernels.linear(act(256, 2048), wide, empty(1, 256, 32768))


def attentions() -> Iterator[tuple[str, Callable[[], None]]]:
    def call(
        heads: int, kv_heads: int, dim: int, window: int, softcap: float, sinks: bool, tokens: int
    ) -> None:
        kv = empty(8, 2, kv_heads, 16, dim, dtype=torch.bfloat16)
        work, rows = Work(ints(tokens, 8), ints(2 * tokens, 8), ints(4)), step_rows(tokens)
        kernels.build_work(rows, work, heads=heads, kv_heads=kv_heads, window=window, slots=64)
        kernels.attention(
            act(tokens, heads * dim), kv, rows, work, empty(64, 4, heads, dim + 2),
            empty(heads) if sinks else None, act(tokens, heads * dim), heads=heads,
            kv_heads=kv_heads, scale=0.1, window=window, softcap=softcap,
        )  # fmt: skip

    for case in [
        (32, 8, 128, 0, 0.0, False), (32, 8, 64, 0, 0.0, False), (64, 8, 64, 128, 0.0, True),
        (16, 8, 256, 4096, 50.0, False), (16, 16, 72, 0, 0.0, False), (28, 4, 128, 0, 0.0, False),
        (32, 32, 96, 0, 0.0, False), (71, 1, 64, 0, 0.0, False),
    ]:  # fmt: skip
        for tokens in (1, 2048) if case[2] != 96 else (256,):
            yield f"attention {case} {tokens}", lambda a=(*case, tokens): call(*a)


def ropes() -> Iterator[tuple[str, Callable[[], None]]]:
    def call(dim: int, parts: int, norm: bool, pairs: int, interleaved: bool, bias: bool) -> None:
        q, k = empty(parts, 8, 8 * dim), empty(parts, 8, 2 * dim)
        n, b = empty(dim) if norm else None, empty(8 * dim) if bias else None
        kernels.rope_kv(
            q, k, k, b, b, b, n, n, empty(pairs), ints(pairs), step_rows(8), act(8, 8 * dim),
            empty(8, 2, 2, 16, dim, dtype=torch.bfloat16), heads=8, kv_heads=2, eps=1e-6,
            factor=1.0, interleaved=interleaved,
        )  # fmt: skip

    for case in [
        (128, 4, True, 64, False, False), (64, 1, False, 32, True, True),
        (80, 1, False, 16, False, True), (64, 2, False, 0, False, False),
    ]:  # fmt: skip
        yield f"rope {case}", lambda a=case: call(*a)
    kv = empty(8, 2, 2, 16, 128, dtype=torch.bfloat16)
    yield "copy slots", lambda: kernels.copy_slots(kv, ints(3, 2))


def rows() -> Iterator[tuple[str, Callable[[], None]]]:
    """Norms, and what takes elements one by one."""
    for width, parts in [(768, 1), (4096, 4), (8192, 2), (16384, 1)]:
        x, y, v, a = empty(parts, 8, width), empty(8, width), empty(width), act(8, width)
        yield f"norm {width}", lambda x=x, y=y, v=v, a=a: kernels.add_norm(x, v, y, v, y, y, a, eps=1e-6)  # fmt: skip
        yield f"layer norm {width}", lambda x=x, y=y, v=v, a=a: kernels.add_layer_norm(x, v, y, v, v, y, None, a, eps=1e-6)  # fmt: skip
        yield f"norm add {width}", lambda x=x, y=y, v=v: kernels.norm_add(x, v, v, y, y, eps=1e-6)
    x, y, a = empty(3, 8, 5000), empty(8, 5000), act(8, 5000)
    yield "combine", lambda: kernels.combine(x, None, y, y, a, cap=30.0)
    yield "permute", lambda: kernels.permute(a, ints(5000), a)
    for kind in ("silu", "gelu_tanh", "gelu", "tanh", "relu", "swiglu_clamped", "quick_gelu"):
        up_part = x if kind == "swiglu_clamped" else None
        yield f"glu {kind}", lambda k=kind, u=up_part: kernels.glu(x, u, None, None, a, activation=k)  # fmt: skip
    for kind, group, minima in FORMATS:
        w = matrix(kind, group, minima, 32000, 2048)
        yield f"embed {kind}/{group}{'+' * minima}", lambda w=w: kernels.embed(w, ints(8), empty(8, 2048), scale=2.0, offset=0)  # fmt: skip
    yield "give", lambda: kernels.give(empty(4, 8192), ints(8), empty(8, 2048), first=0, add=True)
    yield "select", lambda: kernels.select(empty(8, 2048), ints(4), empty(4, 2048), act(4, 2048))
    masks = empty(4, 16032, dtype=torch.uint8)
    columns = [
        empty(4),
        empty(4),
        empty(4),
        ints(4),
        *(empty(4, dtype=torch.int64) for _ in range(2)),
    ]
    yield "draw", lambda: kernels.draw(empty(4, 128256), masks, *columns, ints(4))
    yield "argmax", lambda: kernels.argmax(empty(4, 128256), masks, ints(4))


def experts() -> Iterator[tuple[str, Callable[[], None]]]:
    t, k, e, f, width = 8, 4, 32, 2880, 2880
    pairs, ids = t * k, ints(t, k)
    order = ints(up(pairs, 16) + 16 * min(e, pairs))
    owner = ints(order.shape[0] // 16)
    gate, out = empty(pairs, f), empty(t, width)
    yield "route", lambda: kernels.route(empty(2, t, e), empty(e), ids, empty(t, k), normalize=True)
    yield "sort pairs", lambda: kernels.sort_pairs(ids, order, owner, experts=e)
    for kind, group, minima in FORMATS:
        w = matrix(kind, group, minima, f, width, e)
        yield f"experts {kind}/{group}{'+' * minima}", lambda w=w: kernels.expert_linear(act(t, width), w, order, owner, gate, choices=k)  # fmt: skip
    bias = empty(e, f)
    yield "expert glu", lambda: kernels.expert_glu(gate, gate, ids, bias, bias, act(pairs, f), activation="swiglu_clamped")  # fmt: skip
    yield "expert sum", lambda: kernels.expert_sum(gate, ids, empty(t, k), bias, out, out)


GROUPS = {"linear": linears, "attention": attentions, "rope": ropes, "rows": rows, "experts": experts}  # fmt: skip
