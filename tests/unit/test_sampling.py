"""The native sampler against a plain numpy one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import _native
from octavo.backends.base import SamplingRow


def philox(seed: int, position: int) -> float:
    """Philox-4x32-10 as published (Salmon et al., 2011), in Python integers."""
    c = [position & 0xFFFFFFFF, position >> 32, 0, 0]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return ((c[0] << 32 | c[1]) >> 11) * 2.0**-53


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_random_numbers(seed: int, position: int) -> None:
    assert _native.uniform(seed, position) == philox(seed, position)


def allowed(logits: np.ndarray, row: SamplingRow) -> set[int]:
    """Tokens the filters leave, computed the long way, with a little slack at the top-p edge."""
    scaled = logits.astype(np.float64) / row.temperature
    order = np.lexsort((np.arange(len(logits)), -logits))
    if row.top_k:
        order = order[: row.top_k]
    p = np.exp(scaled[order] - scaled[order[0]])
    before = np.cumsum(p) / p.sum() - p / p.sum()
    keep = (before <= row.top_p + 1e-5) & (p >= row.min_p * (1 - 1e-5))
    return set(order[keep].tolist())


rows = st.builds(
    SamplingRow,
    temperature=st.sampled_from([0.2, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 50, 100000]),
    seed=st.integers(0, 2**62),
    position=st.integers(0, 1000),
    logprobs=st.just(-1),
    adjustments=st.just([]),
)


@settings(max_examples=150, deadline=None)
@given(rows, st.integers(1, 3000), st.integers(0, 1000))
def test_only_allowed_tokens(row: SamplingRow, vocabulary: int, seed: int) -> None:
    logits = (np.random.default_rng(seed).standard_normal(vocabulary) * 4).astype(np.float32)
    token, *_ = _native.sample("", logits, tuple(row))
    assert token in allowed(logits, row)


def test_frequencies_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    for top_k in (0, 4):  # both ways of drawing
        counts = np.zeros(4)
        for position in range(20_000):
            counts[
                _native.sample(
                    "", logits, tuple(SamplingRow(1.0, top_k=top_k, seed=1, position=position))
                )[0]
            ] += 1
        # Five standard deviations of a binomial share.
        share = np.exp(logits)
        assert (np.abs(counts / 20_000 - share) < 5 * np.sqrt(share * (1 - share) / 20_000)).all()


def test_greedy_ties_go_to_the_lower_token() -> None:
    logits = np.zeros(100, np.float32)
    logits[[7, 60]] = 3
    assert _native.sample("", logits, tuple(SamplingRow()))[0] == 7


def test_logprobs_are_those_of_the_model() -> None:
    logits = (np.random.default_rng(0).standard_normal(49152) * 3).astype(np.float32)
    row = SamplingRow(logprobs=5, adjustments=[(17, 100.0, 1.0)])
    token, logprob, top, top_logprobs = _native.sample("", logits, tuple(row))
    p = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert token == 17  # the bias decides, the log-probability ignores it
    assert logprob == pytest.approx(p[17], abs=1e-5)
    assert top == np.argsort(-logits, kind="stable")[:5].tolist()
    assert top_logprobs == pytest.approx(p[top].tolist(), abs=1e-5)


def test_penalties_and_bias() -> None:
    logits = np.array([2.0, 1.9, -1.0, 0.0], np.float32)

    def pick(*adjustments: tuple[int, float, float]) -> int:
        return _native.sample("", logits, tuple(SamplingRow(adjustments=list(adjustments))))[0]

    assert pick() == 0
    assert pick((0, -0.2, 1.0)) == 1  # presence or frequency
    assert pick((0, 0.0, 1.1)) == 1  # repetition divides what is positive
    assert pick((0, -100, 1.0), (1, -100, 1.0)) == 3
    assert (
        pick((2, 0.0, 0.1), (0, -100, 1), (1, -100, 1), (3, -0.2, 1)) == 2
    )  # and multiplies the rest


def test_bad_logits_do_not_hang() -> None:
    for value in (np.nan, np.inf, -np.inf):
        logits = np.full(1000, value, np.float32)
        for row in (
            SamplingRow(),
            SamplingRow(1.0),
            SamplingRow(1.0, top_p=0.5),
            SamplingRow(1.0, top_k=5),
        ):
            assert 0 <= _native.sample("", logits, tuple(row))[0] < 1000
