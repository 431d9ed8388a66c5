"""Attention kernels of every cache and instruction set against plain numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import _native

Array = npt.NDArray[np.float64]
CACHES = ["f32", "bf16", "int8"]
ISAS = _native.isas()
PRODUCTS = ("avx512bf16", "amx")  # of bf16
SAME = [isa for isa in ISAS if isa not in ("amx", "scalar")]  # fused multiply-add, registers


def to_bf16(x: Array) -> Array:
    bits: npt.NDArray[np.uint64] = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def to_int8(x: Array) -> tuple[Array, Array]:
    """Values as they are cached, and each one's scale: bf16, rounded up, for 16 dimensions."""
    groups = x.reshape(len(x), -1, 16)
    wanted = (np.abs(groups).max(-1, keepdims=True) / 127).astype(np.float32)
    scale = ((wanted.view(np.uint32) + 0xFFFF) & 0xFFFF0000).view(np.float32).astype(np.float64)
    return (np.rint(groups / scale) * scale).reshape(x.shape), np.repeat(scale, 16, -1).reshape(
        x.shape
    )


def turned(x: Array) -> Array:
    """Sums and differences of neighbours, as often as it takes."""
    for _ in range(_times(x)):
        a, b = x[:, 0::2], x[:, 1::2]
        x = np.concatenate([a + b, a - b], -1)
    return x


def _times(x: Array) -> int:
    return int(np.ceil(np.log2(x.shape[-1])))


class Case:
    """Queries, keys and values as a cache of a kind has them."""

    def __init__(self, kind: str, head: int, keys: int, rows: int, seed: int, cap: float) -> None:
        rng = np.random.default_rng(seed)
        self.kind, self.cap, self.scale = kind, cap, 1.5 / head**0.5
        q, k, v = (rng.standard_normal((n, head)).astype(np.float32) for n in (rows, keys, keys))
        k[:, 1] *= 8  # a dimension larger than others
        self.q, self.k, self.v = q, k, v
        self.last = np.sort(rng.integers(0, keys, rows)).astype(np.int32)
        self.first = np.where(rng.random(rows) < 0.5, 0, self.last // 3 * 2).astype(np.int32)

    def run(
        self, isa: str, tile: int = 16, former: float = 0, remainder: bool = True
    ) -> npt.NDArray[np.float32]:
        return _native.attend(
            isa, self.kind, self.q, self.k, self.v, self.first, self.last, self.scale, self.cap,
            former, tile, remainder,
        )  # fmt: skip

    def expected(self, isa: str) -> tuple[Array, Array]:
        """The result from cached values in double, and how far off a kernel may be."""
        pad = ((0, 0), (0, -self.q.shape[1] % 16))
        q, k, v = (np.pad(x.astype(np.float64), pad) for x in (self.q, self.k, self.v))
        q *= np.float32(self.scale)
        steps = np.zeros_like(v)
        if self.kind == "bf16":
            k, v = to_bf16(k), to_bf16(v)
        if self.kind == "int8":
            q = turned(q) * 0.5 ** _times(q)
            (k, _), (v, steps) = to_int8(turned(k)), to_int8(v)
        scores, sizes = q @ k.T, np.abs(q) @ np.abs(k).T
        if self.cap:
            scores = self.cap * np.tanh(scores / self.cap)
        # fp32 sums; 16-bit queries of an int8 cache, 16 bits in two bf16 for bf16 products
        off = sizes * (len(q[0]) + 16) * 2.0**-24 + 4e-7 * max(self.cap, 1)
        if self.kind == "int8":
            off += np.abs(q).max(-1, keepdims=True) / 65534 * np.abs(k).sum(-1)
        weight, value = 1e-6, np.abs(v).max()
        if isa == "amx" and self.kind != "f32":
            off += sizes * (2.0**-16 + (2.0**-9 if self.kind == "int8" else 0))
            weight += 2.0**-8
        elif isa == "avx512bf16" and self.kind == "bf16":
            off += sizes * 2.0**-16
            weight += 2.0**-9
        result, bound = np.zeros_like(q), np.zeros(len(q))
        for r, (first, last) in enumerate(zip(self.first, self.last, strict=True)):
            seen = slice(first, last + 1)
            e = np.exp(scores[r, seen] - scores[r, seen].max())
            result[r] = e @ v[seen] / e.sum()
            factor = np.expm1(off[r, seen].max() + weight)
            bound[r] = 2 * factor / (1 - factor) * value
        # int8: weights are whole multiples of 2^-14 of the tile's largest, at 64 tokens and codes up to 127
        bound += 64 * 127 * steps.max() * 2.0**-15 + len(k) * 2.0**-23 * value
        return result[:, : self.q.shape[1]], bound[:, None]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", CACHES)
@settings(max_examples=12, deadline=None)
@given(
    head=st.sampled_from([10, 16, 48, 64, 80, 128, 256]),
    keys=st.integers(1, 600),
    rows=st.integers(1, 19),
    cap=st.sampled_from([0.0, 5.0]),
    seed=st.integers(0, 99),
)
def test_attend(
    kind: str, isa: str, head: int, keys: int, rows: int, cap: float, seed: int
) -> None:
    """Within a bound from arithmetic, and the same bits whichever rows share a call and whatever
    lay in the blocks before."""
    case = Case(kind, head, keys, rows, seed, cap)
    y = case.run(isa)
    for tile in (1, 2, 3, 7):
        assert np.array_equal(case.run(isa, tile), y)
    assert np.array_equal(case.run(isa, former=3e38), y)
    expected, bound = case.expected(isa)
    assert (np.abs(y - expected) <= bound).all()


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("head", [16, 64, 80])
def test_instruction_sets_agree(kind: str, head: int) -> None:
    """Products of int8 caches are whole numbers, and floats meet in one order. Bf16 values are
    multiplied in pairs where there is an instruction for it, which rounds in its own way."""
    case = Case(kind, head, 500, 9, head, 0)
    sets = [isa for isa in SAME if kind != "bf16" or isa != "avx512bf16"]
    first, *others = (case.run(isa) for isa in sets)
    assert all(np.array_equal(first, y) for y in others)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head", [16, 64, 80])
def test_queries_without_remainders(head: int, isa: str) -> None:
    """They give what bf16 queries give, where products are of bf16; else they are fp32 all the same."""
    case = Case("bf16", head, 300, 11, head, 0)
    case.scale = 0.125  # which rounds nothing
    whole = case.run(isa)
    rounded = case.run(isa, remainder=False)
    for tile in (1, 2, 3):
        assert np.array_equal(case.run(isa, tile, remainder=False), rounded)
    assert np.array_equal(rounded, whole) == (isa not in PRODUCTS)
    if isa in PRODUCTS:
        case.q = to_bf16(case.q).astype(np.float32)
    assert np.array_equal(case.run(isa), rounded)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", CACHES)
def test_zeros_and_large_values(kind: str, isa: str) -> None:
    """Groups of zeros have no scale; tokens that a row does not see have no say in its units."""
    case = Case(kind, 64, 90, 3, 1, 0)
    case.v[:, :16] = 0
    case.v[60:, 16:] *= 1e30
    case.last[:], case.first[:] = 59, 0
    y = case.run(isa)
    assert np.array_equal(y[:, :16], np.zeros((3, 16), np.float32))
    case.v[60:] = 1
    assert np.array_equal(case.run(isa), y)
    case.k[:], case.q[:] = 0, 0
    mean = case.v[:60].astype(np.float64).mean(0)
    assert (np.abs(case.run(isa) - mean) <= np.abs(case.v[:60]).max() / 100).all()
