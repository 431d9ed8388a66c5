"""Encoders of block formats, decoded by the gguf package and judged by what they lose."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.checkpoint.base import TensorType
from octavo.checkpoint.dequantize import IQ4_NL_VALUES, decoded
from octavo.compress.blocks import ENCODED, encode
from octavo.compress.fit import affine, nearest, symmetric, tabled
from octavo.errors import UsageError

# Bits of a code, and whether a group has a minimum of its own.
GRIDS = {
    "Q4_0": (4, False), "Q4_1": (4, True), "Q5_0": (5, False), "Q5_1": (5, True),
    "Q8_0": (8, False), "Q2_K": (2, True), "Q3_K": (3, False), "Q4_K": (4, True),
    "Q5_K": (5, True), "Q6_K": (6, False),
}  # fmt: skip
# Mean weighted error over mean square of normal numbers, which llama.cpp's quantizer (b6503, without
# and with an importance) reaches on the numbers of `weights`.
LLAMA_CPP = {
    "Q4_0": (1.087e-02, 8.754e-03), "Q4_1": (7.205e-03, 4.440e-03), "Q5_0": (2.707e-03, 2.240e-03),
    "Q5_1": (1.698e-03, 1.034e-03), "Q8_0": (4.253e-05, 4.247e-05), "IQ4_NL": (7.488e-03, 6.050e-03),
    "MXFP4": (1.575e-02, 1.605e-02), "Q2_K": (1.014e-01, 5.417e-02), "Q3_K": (2.887e-02, 2.160e-02),
    "Q4_K": (6.178e-03, 4.707e-03), "Q5_K": (1.582e-03, 1.285e-03), "Q6_K": (4.197e-04, 3.399e-04),
}  # fmt: skip


def weights() -> tuple[np.ndarray, np.ndarray]:
    """Normal numbers with columns of outliers, and the importance of columns."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((64, 1536)) * 0.05).astype(np.float32)
    x[:, ::97] *= 4
    return x, (rng.random(1536) ** 4 * 10 + 0.01).astype(np.float32)


def decode(raw: np.ndarray, kind: TensorType) -> np.ndarray:
    return gguf.quants.dequantize(raw, Q(int(kind)))


@pytest.mark.parametrize("kind", ENCODED, ids=lambda k: k.name)
def test_losing_no_more_than_llama_cpp(kind: TensorType) -> None:
    x, importance = weights()
    for w, theirs in zip((None, importance), LLAMA_CPP[kind.name], strict=True):
        y = decode(encode(x, kind, w), kind)
        by = np.ones_like(importance) if w is None else w
        lost = float((by * (x - y) ** 2).sum() / (by * x**2).sum())
        assert lost <= theirs * 1.0005  # which is printed with four digits


@pytest.mark.parametrize("kind", ENCODED, ids=lambda k: k.name)
def test_read_alike_by_gguf_and_us(kind: TensorType) -> None:
    raw = encode(weights()[0], kind)
    assert raw.shape == (64, 1536 // kind.block[0] * kind.block[1])
    ours = decoded(raw, kind).reshape(64, -1)
    assert (ours == decode(raw, kind)).all()


@pytest.mark.parametrize("kind", ENCODED, ids=lambda k: k.name)
def test_odd_values(kind: TensorType) -> None:
    """Zeros stay zeros; a constant, a single spike, and very small and large numbers decode to
    finite numbers no further off than the numbers are large."""
    n = kind.block[0]
    rows = {
        "zeros": np.zeros(n), "ones": np.ones(n), "spike": np.eye(1, n)[0] * -3,
        "small": np.linspace(-1e-30, 1e-30, n), "large": np.linspace(-1e4, 1e4, n),
        "positive": np.linspace(1, 2, n), "negative": np.linspace(-2, -1, n),
    }  # fmt: skip
    x = np.stack(list(rows.values())).astype(np.float32)
    y = decode(encode(x, kind), kind)
    assert np.isfinite(y).all() and not y[0].any()
    assert (np.abs(x - y).max(axis=1) <= np.abs(x).max(axis=1)).all()


@pytest.mark.parametrize("name", GRIDS)
def test_half_a_step_at_most(name: str) -> None:
    """Uniform numbers fill a grid: the error is at most a step of one with a code less."""
    kind, (bits, minimum) = TensorType[name], GRIDS[name]
    rng = np.random.default_rng(1)
    x = rng.uniform(0 if minimum else -1, 1, (8, 512)).astype(np.float32)
    y = decode(encode(x, kind), kind)
    assert np.abs(x - y).max() <= (1 if minimum else 2) / (2**bits - 2)


def test_refusals() -> None:
    with pytest.raises(UsageError, match="rows of 48 are not whole Q4_0 blocks of 32"):
        encode(np.zeros((2, 48), np.float32), TensorType.Q4_0)
    with pytest.raises(UsageError, match="1 of the weights are not finite"):
        encode(np.array([[np.nan] + [0] * 31], np.float32), TensorType.Q4_0)
    with pytest.raises(UsageError, match="no encoder for F16"):
        encode(np.zeros((2, 32), np.float32), TensorType.F16)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 32))
def test_scales_of_a_table_beat_a_fine_comb(seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((1, 32)).astype(np.float32)
    top = float(np.abs(x).max())
    table = IQ4_NL_VALUES

    def lost(scale: float) -> float:
        return float(((x - scale * table[nearest(x / np.float32(scale), table)]) ** 2).sum())

    comb = [s * top / 113 for s in np.linspace(0.5, 1.2, 400)]
    grid = tabled(x, np.ones_like(x), table)
    found = float(((x - grid.scale[:, None] * table[grid.codes]) ** 2).sum())
    assert found <= min(map(lost, comb + [-s for s in comb])) * 1.0001


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 32), st.sampled_from([2, 3, 4]))
def test_searches_beat_every_scale_of_a_fine_comb(seed: int, bits: int) -> None:
    """Against 2,000 scales tried one by one: no worse than the best of them; grids with a minimum,
    of which there are too many to try, within a tenth."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((1, 32)).astype(np.float32)
    w = rng.uniform(0.1, 1, (1, 32)).astype(np.float32)
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    top = float(np.abs(x).max())

    def lost(scale: float) -> float:
        q = np.clip(np.rint(x / scale), low, high)
        return float((w * (x - scale * q) ** 2).sum())

    comb = [s * top / high for s in np.linspace(0.3, 1.1, 1000)]
    best = min(map(lost, comb + [-s for s in comb]))
    grid = symmetric(x, w, low, high)
    found = float((w * (x - grid.scale[:, None] * grid.codes) ** 2).sum())
    assert found <= best * 1.0001
    both = affine(x, w, high - low)
    decoded = both.scale[:, None] * both.codes + both.minimum[:, None]
    assert float((w * (x - decoded) ** 2).sum()) <= best * 1.1
