"""Greedy tokens, for which few logits are computed in full, are those of the largest logit of all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import _native
from octavo.backends.base import SamplingRow, Span
from octavo.checkpoint import TensorType
from tests.unit.test_kernels import group_of, random_blocks

ISAS = _native.isas()
SCREENED = [
    TensorType.Q8_0, TensorType.Q6_K, TensorType.Q5_0, TensorType.Q4_0, TensorType.IQ4_NL,
    TensorType.MXFP4, TensorType.Q3_K, TensorType.INT4, TensorType.INT8,
]  # fmt: skip
COMPUTED = [TensorType.Q4_1, TensorType.Q4_K, TensorType.INT8_MIN, TensorType.BF16]
ROWS = 70  # more than are screened together


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Head:
    """A head by itself, whose inputs have two digits in every group."""

    def __init__(
        self, isa: str, threads: int, kind: TensorType, raw: np.ndarray, vocabulary: int,
        width: int, group: int = 0, second_lines: int = 8,
    ) -> None:  # fmt: skip
        self.kind, self.raw, self.vocabulary, self.width = kind, raw, vocabulary, width
        self.group, self.second_lines = group, second_lines
        counted = _native.Model(isa, threads, ROWS, ROWS)
        self._record(counted)
        self.model = _native.Model(
            isa, threads, ROWS, ROWS, counted.weight_bytes, counted.buffer_bytes
        )
        self._record(self.model)

    def _record(self, model: _native.Model) -> None:
        forms = {"fixed": False, "grouped": False, "halves": True, "f32": False}
        digits = self.kind is not TensorType.BF16
        matrix = model.add_matrix(int(self.kind), self.group, self.raw, self.vocabulary, self.width)
        given = model.add_buffer(False, self.width)
        act = model.add_act(
            selected=True, width=self.width, apart=False,
            forms=_native.Forms(
                **forms, scaled=digits, bf16=not digits, second_lines=self.second_lines
            ),
            adapted=_native.Forms(**forms, scaled=False, bf16=False),
        )  # fmt: skip
        selected = model.add_buffer(True, self.width)
        self.out = model.add_buffer(True, self.vocabulary)
        model.embed(-1, given, 1.0, 0, 0, True)
        model.select_rows(given, selected, act)
        model.linear(act, [_native.LinearPart(matrix=matrix, out=self.out)], -1)
        model.output(self.out, self.vocabulary, True)
        model.allocate_cache([], 1, "f32", 1)

    def run(
        self, x: np.ndarray, sampled: SamplingRow | list[SamplingRow] | None, all_logits: bool,
        count: int = ROWS,
    ) -> list[int]:  # fmt: skip
        n = len(x)
        rows = sampled if isinstance(sampled, list) else [sampled] * n if sampled else []
        samples = self.model.step(
            ints(*[0] * n), ints(*[0] * n), [Span(i, 1, 0, 0, -1) for i in range(n)], ints(0),
            ints(*range(n)), rows[:count], ints(), all_logits, 1, [],
            x.astype(np.float32), ints(*range(n)),
        )  # fmt: skip
        return [s[0] for s in samples[0]]

    def logits(self, x: np.ndarray) -> np.ndarray:
        self.run(x, None, True)
        return self.model.rows(self.out, 0, len(x))

    def tokens(self, x: np.ndarray) -> list[int]:
        return self.run(x, SamplingRow(), False)

    def computed(self, x: np.ndarray) -> float:
        """The share of logits that a step computes whose rows are greedy."""
        logits = self.logits(x)
        self.logits(np.zeros_like(x))
        self.tokens(x)
        return float((self.model.rows(self.out, 0, len(x)) == logits).mean())

    def prepare(self) -> int:
        """Finds the norms of all tokens; how many calls that took."""
        calls = 1
        while self.model.pack(1 << 14):
            calls += 1
        return calls


def inputs(rows: int, width: int, seed: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, width))
    if kind == "outliers":  # what other features have is all in low digits
        x[:, ::32] *= 10_000
    elif kind == "huge":  # logits overflow
        x *= 1e37
    elif kind == "low digits":  # high ones are zero but for one feature of each group
        x = rng.choice([-127.0, 127.0], (rows, width))
        x[:, ::32] = 127 * 257
    elif kind == "zeros":
        x[::2] = 0
    return x.astype(np.float32)


INPUTS = ["normal", "outliers", "low digits", "zeros"]


@pytest.mark.parametrize("kind", [*SCREENED, *COMPUTED], ids=lambda k: k.name)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=6, deadline=None)
@given(
    vocabulary=st.integers(1, 1200), blocks=st.integers(1, 3), rows=st.integers(1, ROWS),
    threads=st.integers(1, 3), of=st.sampled_from([*INPUTS, "huge"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_tokens_of_the_largest_logits(
    kind: TensorType, isa: str, vocabulary: int, blocks: int, rows: int, threads: int, of: str,
    seed: int,
) -> None:  # fmt: skip
    width = blocks * 256
    raw = random_blocks(kind, vocabulary, width, seed)
    head = Head(isa, threads, kind, raw, vocabulary, width, group_of(kind, seed))
    x = inputs(rows, width, seed, of)
    expected = head.run(x, SamplingRow(), True)
    assert head.tokens(x) == expected
    head.prepare()
    assert head.tokens(x) == expected


def q8_0(codes: np.ndarray) -> np.ndarray:
    """Rows of Q8_0 with a scale of 1 / 128."""
    scale = np.full((*codes.shape[:-1], codes.shape[-1] // 32, 1), 1 / 128, np.float16)
    blocks = codes.astype(np.int8).reshape(*codes.shape[:-1], -1, 32)
    return np.concatenate([scale.view(np.int8), blocks], -1).view(np.uint8).reshape(-1)


@pytest.mark.parametrize("width", [64, 256, 1024])
@pytest.mark.parametrize("isa", ISAS)
def test_a_logit_that_is_all_in_low_digits(isa: str, width: int) -> None:
    """It exceeds the largest of high digits by nearly all that the bound allows: one of 0.96 would
    leave it out."""
    x = inputs(4, width, 3, "low digits")
    codes = np.zeros((1000, width))
    codes[0, ::32] = 15
    codes[700] = np.where(np.arange(width) % 32 == 0, 0, 127 * np.sign(x[2]))
    head = Head(isa, 1, TensorType.Q8_0, q8_0(codes), 1000, width)
    logits = head.logits(x)
    assert logits[2, 700] > logits[2, 0] > 0.97 * logits[2, 700]
    head.prepare()
    assert head.tokens(x)[2] == 700


def test_rows_that_are_not_sampled_and_rows_that_are_drawn() -> None:
    head = Head(
        _native.isa(), 2, TensorType.Q8_0, random_blocks(TensorType.Q8_0, 900, 256, 1), 900, 256
    )
    head.prepare()
    x = inputs(8, 256, 1, "normal")
    expected = head.logits(x).argmax(-1).tolist()
    assert head.run(x, SamplingRow(), False, count=3) == expected[:3]
    drawn = [SamplingRow(target=5), *[SamplingRow()] * 7]
    assert head.run(x, drawn, False) == [5, *expected[1:]] != expected


@pytest.mark.parametrize("of", INPUTS)
@pytest.mark.parametrize("kind", [TensorType.Q8_0, TensorType.Q6_K], ids=lambda k: k.name)
@pytest.mark.parametrize("isa", ISAS)
def test_equal_logits(isa: str, kind: TensorType, of: str) -> None:
    """Of rows that are there twice the first is the token, whichever thread comes to which."""
    raw = np.tile(random_blocks(kind, 700, 256, 5), 2)
    head = Head(isa, 2, kind, raw, 1400, 256)
    head.prepare()
    x = inputs(32, 256, 3, of)
    expected = head.logits(x).argmax(-1).tolist()
    assert max(expected) < 700
    for _ in range(20):
        assert head.tokens(x) == expected


@pytest.mark.parametrize(
    "isa, kind",
    [(isa, TensorType.Q6_K) for isa in ISAS]
    + [(isa, TensorType.Q8_0) for isa in ISAS if isa != "avx2"],
)
def test_few_logits_are_computed(isa: str, kind: TensorType) -> None:
    """Once norms are known, and where nothing but the token is asked for."""
    rng = np.random.default_rng(1)
    head = Head(isa, 2, kind, random_blocks(kind, 8000, 256, 1), 8000, 256)
    x = rng.standard_normal((4, 256)).astype(np.float32)
    assert head.computed(x) == 1
    assert head.prepare() > 5
    assert head.computed(x) < 0.2
    logits = head.logits(x)
    every = [
        SamplingRow(logprobs=0),
        SamplingRow(temperature=1.0),
        SamplingRow(target=5),
        SamplingRow(adjustments=[(7, 1.0, 1.0)]),
    ]
    for sampled in every:
        head.logits(np.zeros_like(x))
        head.run(x, sampled, False)
        assert (head.model.rows(head.out, 0, 4) == logits).all()
    head.logits(np.zeros_like(x))
    head.run(x, SamplingRow(), True)
    assert (head.model.rows(head.out, 0, 4) == logits).all()


@pytest.mark.parametrize(
    "isa, second_lines",
    [(_native.isa(), 1), (_native.isa(), 0)] + [(isa, 8) for isa in ISAS if isa == "avx2"],
)
def test_all_logits_are_computed(isa: str, second_lines: int) -> None:
    """Where inputs have one digit, or a second one costs nothing."""
    raw = random_blocks(TensorType.Q8_0, 2000, 256, 1)
    head = Head(isa, 2, TensorType.Q8_0, raw, 2000, 256, second_lines=second_lines)
    assert head.prepare() == 1
    assert head.computed(np.ones((2, 256), np.float32)) == 1
