"""Packing and linear kernels of every format and instruction set against plain numpy."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import _native
from octavo.checkpoint import TensorType
from octavo.checkpoint.base import BLOCKS, DIGITAL, GROUPED, PACKED
from octavo.checkpoint.dequantize import decoded
from octavo.checkpoint.grouped import WITH_MINIMUM, Codes, Grouped, e4m3

GROUPS = [32, 64, 128, 4096]
FIXED = [  # multiplied in fixed point
    TensorType.Q4_0,
    TensorType.Q4_1,
    TensorType.Q4_K,
    TensorType.INT4,
    TensorType.INT4_MIN,
]

ISAS = _native.isas()


def grouped(kind: TensorType, rows: int, cols: int, group: int, seed: int) -> Grouped:
    """Any codes but FP8's NaN, scales and minima as they come."""
    rng = np.random.default_rng(seed)
    groups = -(-cols // group)
    codes = rng.integers(0, 256, (rows, cols), dtype=np.uint8)
    if kind in (TensorType.INT4, TensorType.INT4_MIN, TensorType.TABLE4):
        codes &= 15
    if kind is TensorType.FP8:
        codes[codes & 127 == 127] = 0
    numbers = rng.standard_normal((2, rows, groups)).astype(np.float32) * np.float32(0.02)
    table = rng.standard_normal(16).astype(np.float32) if kind is TensorType.TABLE4 else None
    read = Codes(codes, numbers[0], numbers[1] if kind in WITH_MINIMUM else None, table)
    return Grouped("w", kind, (rows, cols), group, 0, lambda: read, 8)


def group_of(kind: TensorType, seed: int) -> int:
    return GROUPS[seed % 4] if kind in GROUPED else 0


def random_blocks(kind: TensorType, rows: int, cols: int, seed: int) -> np.ndarray:
    """Any bit pattern in the codes, sane numbers in the scales."""
    if kind in GROUPED:
        return grouped(kind, rows, cols, group_of(kind, seed), seed).raw()
    rng = np.random.default_rng(seed)
    if _block(kind) == 1:
        x = rng.standard_normal((rows, cols)).astype(np.float32)
        if kind is TensorType.F16:
            x = x.astype(np.float16)
        elif kind is TensorType.BF16:
            x = (x.view(np.uint32) >> 16).astype(np.uint16)
        return np.frombuffer(x.tobytes(), np.uint8)
    elements, size = kind.block
    raw = rng.integers(0, 256, (rows * cols // elements, size), dtype=np.uint8)
    places = {
        "Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208], "Q4_0": [0], "Q5_0": [0], "Q8_0": [0],
        "IQ4_NL": [0],
    }.get(kind.name, [0, 2])  # fmt: skip
    if kind is TensorType.MXFP4:
        places = []
        raw[:, 0] = rng.integers(100, 130, len(raw))
    for at in places:
        scale = (rng.standard_normal(len(raw)) * 0.02).astype(np.float16)
        raw[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return np.ascontiguousarray(raw).reshape(-1)


def _block(kind: TensorType) -> int:
    return kind.block[0] if kind in BLOCKS else 1


def values(kind: TensorType, raw: np.ndarray, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    if kind in GROUPED:
        return grouped(kind, rows, cols, group_of(kind, seed), seed).values()
    if kind in BLOCKS:
        return decoded(raw, kind).reshape(rows, cols)
    if kind is TensorType.BF16:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(rows, cols)
    return (
        raw.view(np.float32 if kind is TensorType.F32 else np.float16)
        .astype(np.float32)
        .reshape(rows, cols)
    )


def test_fp8_equals_torch() -> None:
    import torch

    codes = np.arange(256, dtype=np.uint8)
    oracle = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(e4m3(codes)[codes & 127 != 127], oracle[codes & 127 != 127])


FLOATS = [kind for kind in PACKED if kind not in DIGITAL]


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda k: k.name)
def test_dequantize_equals_ggml(kind: TensorType) -> None:
    raw = random_blocks(kind, 8, 512, 1)
    oracle = gguf.quants.dequantize(raw.reshape(8, -1), gguf.GGMLQuantizationType(int(kind)))
    assert np.array_equal(values(kind, raw, 8, 512), oracle)


@pytest.mark.parametrize("kind", PACKED, ids=lambda k: k.name)
@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 40), blocks=st.integers(1, 5), seed=st.integers(0, 99))
def test_packing_loses_nothing(kind: TensorType, rows: int, blocks: int, seed: int) -> None:
    cols = blocks * max(_block(kind), 8)
    raw = random_blocks(kind, rows, cols, seed)
    got = _native.unpack(int(kind), group_of(kind, seed), raw, rows, cols)
    assert np.array_equal(got, values(kind, raw, rows, cols, seed))


def rounding(x: np.ndarray, w: np.ndarray, step: np.ndarray) -> np.ndarray:
    """How far a linear layer may be off whose inputs are each off by `step`."""
    magnitude = np.abs(x) @ np.abs(w).T
    # Formats with a minimum or a zero point add terms larger than their sum.
    offset = 64 * (np.abs(x).sum(-1, keepdims=True) * np.abs(w).max()) * 2.0**-24
    return step @ np.abs(w).T * 1.01 + magnitude * 4 * x.shape[1] ** 0.5 * 2.0**-24 + offset


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", PACKED, ids=lambda k: k.name)
@settings(max_examples=6, deadline=None)
@given(
    rows=st.integers(1, 70),
    blocks=st.integers(1, 9),
    tokens=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_linear(kind: TensorType, isa: str, rows: int, blocks: int, tokens: int, seed: int) -> None:
    """Within a bound from arithmetic, and the same bits for every number of tokens in the call.

    Activations: 127 * 256 + 127 steps per half range of a row; a value is off by half a step, or by one
    more where its low digit would be -128. Two bf16 halves keep 16 bits. Weights in fixed point are off
    by five units (native/runtime/units.h), and the sum of low digits gives its carry only. Accumulation
    in fp32 adds at most one rounding of the running sum's magnitude per group or feature.
    """
    cols = blocks * max(_block(kind), 32)
    raw = random_blocks(kind, rows, cols, seed)
    w = values(kind, raw, rows, cols, seed).astype(np.float64)
    group = group_of(kind, seed)
    x = np.random.default_rng(seed).standard_normal((tokens, cols)).astype(np.float32)
    y = _native.linear(isa, int(kind), group, raw, rows, cols, x, tokens)
    for tile in (1, 2, 3, 5, 12):
        assert np.array_equal(_native.linear(isa, int(kind), group, raw, rows, cols, x, tile), y)
    if kind in DIGITAL:
        step = np.repeat(np.abs(x).max(-1, keepdims=True) * (1.5 / 32639), cols, axis=-1)
    else:
        step = np.abs(x) * (2.0**-16 if kind is TensorType.BF16 else 0)
    bound = rounding(x, w, step)
    if kind in FIXED:
        scales = np.abs(w - w.mean(-1, keepdims=True)).max() + np.abs(w).max()
        unit = scales / 32000 + np.abs(w).sum(-1).max() * 1.01 / 2**24
        bound += unit * (5 * np.abs(x).sum(-1, keepdims=True) + 256 * step[:, :1])
    assert (np.abs(y - x @ w.T) <= bound + 1e-30).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", FLOATS, ids=lambda k: k.name)
def test_many_features_of_floats(kind: TensorType, isa: str) -> None:
    """More than are summed at once."""
    rows, cols, tokens = 72, 2336, 27
    raw = random_blocks(kind, rows, cols, 1)
    w, group = values(kind, raw, rows, cols, 1).astype(np.float64), group_of(kind, 1)
    x = np.random.default_rng(1).standard_normal((tokens, cols)).astype(np.float32)
    y = _native.linear(isa, int(kind), group, raw, rows, cols, x, tokens)
    for tile in (1, 6, 7, 13, 25):
        assert np.array_equal(_native.linear(isa, int(kind), group, raw, rows, cols, x, tile), y)
    step = np.abs(x) * (2.0**-16 if kind is TensorType.BF16 else 0)
    assert (np.abs(y - x @ w.T) <= rounding(x, w, step)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cols", [64, 576, 4096])
def test_bf16_inputs_without_remainders(cols: int, isa: str) -> None:
    """They give what values give that bf16 has, whose remainders are zero."""
    kind = gguf.GGMLQuantizationType.BF16
    x = np.random.default_rng(cols).standard_normal((26, cols)).astype(np.float32)
    half = gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
    for rows in (40, 64):  # panels may be computed by twos: an odd number of them, and an even
        raw = random_blocks(TensorType.BF16, rows, cols, cols)
        given = isa, int(TensorType.BF16), 0, raw, rows, cols
        rounded = _native.linear(*given, half, 26)
        assert not np.array_equal(_native.linear(*given, x, 26), rounded)
        for tile in (1, 4, *range(6, 14), 19, 26):
            assert np.array_equal(_native.linear(*given, x, tile, remainder=False), rounded)


def uneven(tokens: int, cols: int, seed: int) -> np.ndarray:
    """Rows in which some groups of 32 are much larger than others, and some are zero."""
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0, 0.01, 1, 1, 1, 30], (tokens, -(-cols // 32)))
    x = rng.standard_normal((tokens, cols)) * np.repeat(sizes, 32, axis=1)[:, :cols]
    return x.astype(np.float32)


def group_steps(x: np.ndarray, second_lines: int) -> np.ndarray:
    """How far each value may be off. All values of a group have a scale. With two digits everywhere
    its largest is 32,639 steps, and a value off by 1.5 at most. With one digit, the largest outside
    the `second_lines` lines of four with the largest values is 127, unless 1,919 steps, what two
    digits of a line reach, were less than the largest of all; values are off by half a step, or by
    1.5 where a low digit would be -128."""
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, -x.shape[1] % 64)))
    lines = np.sort(np.abs(padded.reshape(len(x), -1, 8, 4)).max(-1), axis=-1)
    if second_lines == 8:
        step = lines[..., -1] * (1.5 / 32639)
    else:
        span = np.maximum(lines[..., 7 - second_lines] / 127, lines[..., -1] / 1919)
        step = span * (1.5 if second_lines else 0.5)
    return np.repeat(step, 32, axis=1)[:, : x.shape[1]]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", DIGITAL, ids=lambda k: k.name)
@settings(max_examples=6, deadline=None)
@given(
    rows=st.integers(1, 70),
    blocks=st.integers(1, 9),
    tokens=st.integers(1, 45),
    seed=st.integers(0, 99),
    second_lines=st.sampled_from([0, 1, 2, 8]),
)
def test_groups_with_scales_of_their_own(
    kind: TensorType, isa: str, rows: int, blocks: int, tokens: int, seed: int, second_lines: int
) -> None:
    """Within a bound from arithmetic, and the same bits for every number of tokens in the call."""
    cols = blocks * max(_block(kind), 32)
    raw = random_blocks(kind, rows, cols, seed)
    w = values(kind, raw, rows, cols, seed).astype(np.float64)
    x, group = uneven(tokens, cols, seed), group_of(kind, seed)

    def linear(tile: int) -> np.ndarray:
        return _native.linear(isa, int(kind), group, raw, rows, cols, x, tile, second_lines)

    y = linear(tokens)
    for tile in (1, 2, 3, 5, 12, 28):
        assert np.array_equal(linear(tile), y)
    bound = rounding(x, w, group_steps(x, second_lines))
    assert (np.abs(y - x @ w.T) <= bound + 1e-30).all()


def test_one_digit_is_one_byte() -> None:
    """Values between two steps of a group's scale are rounded to one of them: 127 sets the step to
    1, and 0.4 becomes 0, unless values have two digits."""
    raw = np.tile(np.frombuffer(np.float16(1).tobytes() + bytes([1] * 32), np.uint8), 16 * 2)
    x = np.full((1, 64), 0.4, np.float32)
    x[0, ::32] = 127
    args = (int(TensorType.Q8_0), 0, raw, 16, 64, x, 1)
    for isa in ISAS:
        one, two = (_native.linear(isa, *args, lines) for lines in (0, 8))
        assert np.array_equal(one, np.full((1, 16), 254, np.float32))
        assert (np.abs(two - x.sum()) < 62 * 127 / 32639).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", DIGITAL, ids=lambda k: k.name)
@pytest.mark.parametrize("second_lines", [1, 2])
def test_lines_with_the_largest_values_have_two_digits(
    kind: TensorType, second_lines: int, isa: str
) -> None:
    """What is left sets the step: a group's other values are multiples of it, and exact. Two tokens
    have their large values in other lines, and one has several that are equally large."""
    cols = max(_block(kind), 64)
    raw, group = random_blocks(kind, 40, cols, 3), group_of(kind, 3)
    w = values(kind, raw, 40, cols, 3).astype(np.float64)
    x = np.random.default_rng(3).integers(-126, 127, (3, cols)).astype(np.float32)
    x[:, ::32] = 127
    x[0, 9::32], x[1, 31::32], x[1, 28::32], x[2, 5::32] = 1400, -1900, 1919, 1555
    x[0, 21::32], x[2, 16::32] = (-700, 1555) if second_lines == 2 else (127, 127)
    y = _native.linear(isa, int(kind), group, raw, 40, cols, x, 3, second_lines)
    assert (np.abs(y - x @ w.T) <= rounding(x, w, np.zeros_like(x)) + 1e-30).all()
    if second_lines == 2:
        off = _native.linear(isa, int(kind), group, raw, 40, cols, x, 3, 1)
        assert not np.allclose(off, x @ w.T, rtol=0, atol=rounding(x, w, np.zeros_like(x)).max())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", FIXED, ids=lambda k: k.name)
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("cols", [256, 4096, 32768])
def test_fixed_point_keeps_within_32_bits(
    kind: TensorType, isa: str, tokens: int, cols: int
) -> None:
    """Every weight of a row as large as it can be, and every digit of the input too."""
    group = 32 if kind in GROUPED else 0
    if kind in GROUPED:
        codes = np.full((16, cols), 15, np.uint8)
        codes[8:] = 0
        scales = np.full((16, cols // 32), 0.5, np.float32)
        parts = [codes, scales, scales] if kind in WITH_MINIMUM else [codes, scales]
        raw = np.frombuffer(b"".join(x.tobytes() for x in parts), np.uint8)
        low = 0.5 if kind in WITH_MINIMUM else -4.0
        w = np.where(codes[:, :1] == 15, low + 7.5, low)[:, 0]
    else:
        elements, size = kind.block
        blocks = np.zeros((16, cols // elements, size), np.uint8)
        head = {"Q4_0": 2, "Q4_1": 4, "Q4_K": 16}[kind.name]
        blocks[..., :2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
        blocks[..., 4:head] = 0xFF  # Q4_K: scales and minima of 63
        blocks[:8, :, head:] = 0xFF
        raw = blocks.reshape(-1)
        w = values(kind, raw, 16, cols)[:, 0]
    unit = np.abs(w).max() * (1 / 32000 + cols / 2**24)
    for sign in (1, -1):
        x = np.full((tokens, cols), sign, np.float32)
        y = _native.linear(isa, int(kind), group, raw, 16, cols, x, tokens)
        assert (np.abs(y - sign * w.astype(np.float64) * cols) <= 5 * unit * cols).all()


FUSED = [isa for isa in ISAS if isa != "scalar"]  # the portable path rounds products and sums apart


@pytest.mark.parametrize("kind", DIGITAL, ids=lambda k: k.name)
@pytest.mark.parametrize("tokens", [1, 3, 4, 8, 9, 15, 28, 33, 300])
@pytest.mark.parametrize("second_lines", [None, 0, 1, 2, 8])
def test_instruction_sets_agree(kind: TensorType, tokens: int, second_lines: int | None) -> None:
    """Integer sums are exact, and floats folded in one order: tiles, wide and narrow registers agree.
    Three panels: a pair and one."""
    cols, rows = 3 * max(_block(kind), 64), 40
    raw = random_blocks(kind, rows, cols, tokens)
    x, group = uneven(tokens, cols, tokens), group_of(kind, tokens)
    first, *others = (
        _native.linear(i, int(kind), group, raw, rows, cols, x, tokens, second_lines) for i in FUSED
    )
    assert all(np.array_equal(first, y) for y in others)


ROUNDED_ONCE = [isa for isa in FUSED if isa not in ("avx512bf16", "amx")]  # no bf16 dot products


@pytest.mark.parametrize("kind", FLOATS, ids=lambda k: k.name)
@pytest.mark.parametrize("tokens", [1, 4, 9, 33])
@pytest.mark.parametrize("cols", [64, 576])
def test_instruction_sets_agree_about_floats(kind: TensorType, tokens: int, cols: int) -> None:
    """Each output is the same sum in the same order, whatever tiles a set has."""
    raw, group = random_blocks(kind, 50, cols, tokens), group_of(kind, tokens)
    x = np.random.default_rng(tokens).standard_normal((tokens, cols)).astype(np.float32)
    first, *others = (
        _native.linear(i, int(kind), group, raw, 50, cols, x, tokens) for i in ROUNDED_ONCE
    )
    assert all(np.array_equal(first, y) for y in others)


ONE = np.array(1, np.float16).tobytes()
LARGEST_CODES = {
    # a block with a scale of 1, and what its codes stand for
    TensorType.Q8_0: (ONE + bytes([128] * 32), -128),
    TensorType.Q5_0: (ONE + bytes([255] * 20), 15),
    TensorType.Q6_K: (bytes([255] * 192 + [1] * 16) + ONE, 31),
}


@pytest.mark.parametrize("kind", LARGEST_CODES, ids=lambda k: k.name)
@pytest.mark.parametrize("sign", [1, -1])
def test_integer_sums_of_largest_codes(kind: TensorType, sign: int) -> None:
    """Codes as large as they can be and activations of full range: where 16 bits would overflow."""
    block, weight = LARGEST_CODES[kind]
    cols = 2 * kind.block[0]
    raw = np.tile(np.frombuffer(block, np.uint8), 16 * 2)
    for isa in ISAS:
        y = _native.linear(
            isa, int(kind), 0, raw, 16, cols, np.full((3, cols), sign, np.float32), 3
        )
        assert (np.abs(y / (sign * weight * cols) - 1) <= 2.0**-20).all()


def test_unknown_instruction_set() -> None:
    with pytest.raises(RuntimeError, match="OCTAVO_ISA"):
        _native.isa("sse9")
