"""The native sampler against a plain numpy one."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
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
    """Tokens the filters leave, computed the long way, with a little slack at every edge."""
    legal = unpack(row.mask, len(logits)) if row.mask else np.ones(len(logits), bool)
    scaled = np.where(legal, logits.astype(np.float64), -np.inf) / row.temperature
    order = np.lexsort((np.arange(len(logits)), -scaled))[: legal.sum()]
    if row.top_k:
        order = order[: row.top_k]
    p = np.exp(scaled[order] - scaled[order[0]])
    before = np.cumsum(p) / p.sum() - p / p.sum()
    keep = (before <= row.top_p + 1e-5) & (p >= row.min_p * (1 - 1e-5))
    order, p = order[keep], p[keep] / p[keep].sum()
    if row.typical_p < 1:
        information = -np.log(np.maximum(p, 1e-300))
        distance = np.abs(information - (p * information).sum())
        by_distance = np.argsort(distance, kind="stable")
        mass = np.cumsum(p[by_distance]) - p[by_distance]
        last = distance[by_distance[mass <= row.typical_p + 1e-5]].max()
        order = order[distance <= last + 1e-4]
    return set(order.tolist())


def unpack(mask: bytes, n: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:n].astype(bool)


def pack(legal: np.ndarray) -> bytes:
    padded = np.zeros((len(legal) + 31) // 32 * 32, bool)
    padded[: len(legal)] = legal
    return np.packbits(padded, bitorder="little").tobytes()


rows = st.builds(
    SamplingRow,
    temperature=st.sampled_from([0.2, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    typical_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 2, 50, 100000]),
    logprobs=st.just(-1),
    target=st.just(-1),
    legal=st.just(False),
    seed=st.integers(0, 2**62),
    position=st.integers(0, 1000),
    adjustments=st.just([]),
    mask=st.just(b""),
)


@settings(max_examples=300, deadline=None)
@given(rows, st.integers(1, 3000), st.integers(0, 1000), st.sampled_from([0.0, 0.01, 0.5]))
def test_only_allowed_tokens(row: SamplingRow, vocabulary: int, seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(vocabulary) * 4).astype(np.float32)
    if share:
        legal = rng.random(vocabulary) < share
        legal[rng.integers(vocabulary)] = True
        row = row._replace(mask=pack(legal))
    token, *_ = _native.sample("", logits, row)
    assert token in allowed(logits, row)


@settings(max_examples=300, deadline=None)
@given(
    rows, st.integers(1, 3000), st.integers(0, 1000), st.sampled_from([0.5, 8.0, 1e4]), st.data()
)
def test_known_statistics_change_nothing(
    row: SamplingRow, vocabulary: int, seed: int, steps: float, data: st.DataObject
) -> None:
    """Logits of few steps have many ties; some are impossible."""
    rng = np.random.default_rng(seed)
    logits = (np.round(rng.standard_normal(vocabulary) * steps) / steps).astype(np.float32)
    logits[rng.random(vocabulary) < 0.2] = -np.inf
    row = row._replace(
        temperature=data.draw(st.sampled_from([0.0, row.temperature])),
        logprobs=data.draw(st.sampled_from([-1, 0, 5])),
        target=data.draw(st.sampled_from([-1, 0])),
        adjustments=data.draw(
            st.sampled_from([[], [(0, 50.0, 1.0), (vocabulary - 1, -50.0, 1.0)]])
        ),
        mask=data.draw(st.sampled_from([b"", pack(rng.random(vocabulary) < 0.5)])),
    )
    expected = _native.sample("", logits, row)
    assert repr(_native.sample("", logits, row, measured=True)) == repr(expected)


def prefix(masses: np.ndarray, keys: np.ndarray, share: float) -> tuple[int, bool]:
    """How many of a sorted list reach `share` of their mass, and whether rounding could say otherwise:
    of ranks that differ in the last bits, or of a sum as near to the share."""
    sums = np.cumsum(masses)
    at = int(np.searchsorted(sums, share * sums[-1]))
    clear = bool(np.abs(sums - share * sums[-1]).min() > 1e-5 * sums[-1])
    gaps = np.diff(keys[max(0, at - 1) : at + 2])
    return at + 1, clear and bool(((gaps == 0) | (gaps > 1e-4)).all())


def drawn(logits: np.ndarray, row: SamplingRow) -> tuple[int, bool]:
    """The token that `row` draws, by sorting all, in float64; and whether no rounding can change it."""
    inverse = np.float64(np.float32(1) / np.float32(row.temperature))
    rank = (logits.max() - logits.astype(np.float64)) * inverse
    order = np.lexsort((np.arange(len(logits)), -logits))
    order, clear = order[np.isfinite(logits[order])], True
    order = order[: row.top_k or len(order)]
    p = np.exp(-rank[order])
    total = p.sum()
    if row.min_p > 0:
        clear &= bool((np.abs(p - row.min_p) > 1e-5 * row.min_p).all())
        order = order[p >= row.min_p]
    p = np.exp(-rank[order])
    if row.top_p < 1 and p.sum() >= row.top_p * total:
        n, sure = prefix(p, rank[order], row.top_p * total / p.sum())
        order, clear = order[:n], clear and sure
    keys = rank
    if row.typical_p < 1:
        p = np.exp(-rank[order])
        keys = np.abs(rank - (p * rank[order]).sum() / p.sum())
        order = order[np.lexsort((order, keys[order]))]
        n, sure = prefix(np.exp(-rank[order]), keys[order], row.typical_p)
        order, clear = order[:n], clear and sure
    n, sure = prefix(np.exp(-rank[order]), keys[order], philox(row.seed, row.position))
    return int(order[n - 1]), clear and sure


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    rows, st.integers(1, 20_000), st.integers(0, 2**32 - 1), st.sampled_from([0.3, 1.5, 4.0]),
    st.sampled_from([0.5, 20.0, 1e6]), st.sampled_from([0.0, -50.0, -1e30, -np.inf]),
)  # fmt: skip
@example(SamplingRow(0.7, min_p=0.1, top_p=0.95, top_k=2), 9339, 0, 0.3, 0.5, 0.0)
def test_draws_what_sorting_draws(
    row: SamplingRow, vocabulary: int, seed: int, width: float, steps: float, outlier: float
) -> None:
    """Peaked and flat, with many ties and with none, with logits far below the others."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.standard_normal(vocabulary) * width * steps) / steps
    logits[rng.random(vocabulary) < 0.01] = outlier
    logits = logits.astype(np.float32)
    assume(np.isfinite(logits).any())
    if row.top_p == row.typical_p == 1 and not row.min_p and not 0 < row.top_k < vocabulary:
        row = row._replace(typical_p=0.9)  # without filters, tokens are drawn in order of id
    token, clear = drawn(logits, row)
    assume(clear)
    assert _native.sample("", logits, row)[0] == token


@pytest.mark.parametrize(
    "row",
    [
        SamplingRow(1.0, typical_p=0.9), SamplingRow(1.0, typical_p=0.9, top_p=0.95), SamplingRow(2.0, top_p=0.95),
        SamplingRow(1.0, top_p=0.999), SamplingRow(1.0, min_p=1e-5), SamplingRow(1.0, top_k=100_000),
    ],
    ids=lambda row: "-".join(f"{k}={v}" for k, v in row._asdict().items() if v != SamplingRow._field_defaults[k]),
)  # fmt: skip
@pytest.mark.parametrize("width", [0.3, 3.0])
def test_nothing_is_sorted(row: SamplingRow, width: float) -> None:
    """A token of a large vocabulary takes less time than one sort of it; sorting it, it took two to six."""
    logits = (np.random.default_rng(0).standard_normal(262_144) * width).astype(np.float32)

    def least(call: Callable[[], object]) -> float:
        times = []
        for _ in range(7):
            began = time.thread_time()
            call()
            times.append(time.thread_time() - began)
        return min(times)

    sort = least(lambda: np.argsort(logits, kind="stable"))
    assert least(lambda: _native.sample("", logits, row, measured=True)) < sort


def probabilities(logits: np.ndarray, row: SamplingRow) -> np.ndarray:
    """The exact distribution that `row` draws from."""
    p = np.zeros(len(logits))
    for t in allowed(logits, row):
        p[t] = np.exp(float(logits[t]) / row.temperature)
    return p / p.sum()


@pytest.mark.parametrize(
    "row",
    [
        SamplingRow(1.0), SamplingRow(0.7), SamplingRow(1.0, top_k=5), SamplingRow(1.0, top_p=0.8),
        SamplingRow(1.0, min_p=0.1), SamplingRow(1.0, typical_p=0.7),
        SamplingRow(1.5, top_k=20, top_p=0.9, typical_p=0.8),
        SamplingRow(1.0, mask=pack(np.arange(40) % 3 == 0)),
    ],
    ids=lambda row: "-".join(f"{k}={v}" for k, v in row._asdict().items() if v != SamplingRow._field_defaults[k] and k != "mask"),
)  # fmt: skip
def test_chi_square(row: SamplingRow) -> None:
    """20,000 draws against the exact distribution; fails by chance once in 100,000 runs."""
    logits = (np.random.default_rng(3).standard_normal(40) * 1.5).astype(np.float32)
    expected = probabilities(logits, row) * 20_000
    counts = np.zeros(40)
    for position in range(20_000):
        counts[_native.sample("", logits, row._replace(seed=5, position=position))[0]] += 1
    assert not counts[expected == 0].any()
    seen = expected > 0
    statistic = ((counts[seen] - expected[seen]) ** 2 / expected[seen]).sum()
    free = int(seen.sum()) - 1
    # Wilson and Hilferty (1931): chi-square / n to the third is nearly normal; 4.26 standard deviations
    bound = free * (1 - 2 / (9 * free) + 4.26 * (2 / (9 * free)) ** 0.5) ** 3
    assert statistic < bound, (statistic, bound)


def test_nothing_left_to_draw() -> None:
    logits = np.zeros(50, np.float32)
    for row in (
        SamplingRow(mask=pack(np.zeros(50, bool))),
        SamplingRow(1.0, mask=pack(np.zeros(50, bool))),
        SamplingRow(1.0, adjustments=[(i, -np.inf, 1.0) for i in range(50)]),
    ):
        assert _native.sample("", logits, row)[0] == -1


def test_a_target_is_scored_not_drawn() -> None:
    logits = (np.random.default_rng(1).standard_normal(500) * 3).astype(np.float32)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    for token in (0, 17, 499):
        got = _native.sample("", logits, SamplingRow(logprobs=2, target=token))
        assert got[0] == token and abs(got[1] - exact[token]) < 1e-5
        assert got[2] == np.argsort(-logits)[:2].tolist()


def test_legal_alternatives_come_from_the_mask() -> None:
    logits = np.arange(100, dtype=np.float32)
    row = SamplingRow(logprobs=3, legal=True, mask=pack(np.arange(100) % 10 == 0))
    token, logprob, top, top_logprobs = _native.sample("", logits, row)
    assert (token, top) == (90, [90, 80, 70])
    assert top_logprobs[0] == logprob < -9  # of the whole distribution, not of what is legal


def test_frequencies_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    for top_k in (0, 4):  # both ways of drawing
        counts = np.zeros(4)
        for position in range(20_000):
            counts[
                _native.sample(
                    "", logits, SamplingRow(1.0, top_k=top_k, seed=1, position=position)
                )[0]
            ] += 1
        # Five standard deviations of a binomial share.
        share = np.exp(logits)
        assert (np.abs(counts / 20_000 - share) < 5 * np.sqrt(share * (1 - share) / 20_000)).all()


def test_greedy_ties_go_to_the_lower_token() -> None:
    logits = np.zeros(100, np.float32)
    logits[[7, 60]] = 3
    assert _native.sample("", logits, SamplingRow())[0] == 7


def test_logprobs_are_those_of_the_model() -> None:
    logits = (np.random.default_rng(0).standard_normal(49152) * 3).astype(np.float32)
    row = SamplingRow(logprobs=5, adjustments=[(17, 100.0, 1.0)])
    token, logprob, top, top_logprobs = _native.sample("", logits, row)
    p = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert token == 17  # the bias decides, the log-probability ignores it
    assert logprob == pytest.approx(p[17], abs=1e-5)
    assert top == np.argsort(-logits, kind="stable")[:5].tolist()
    assert top_logprobs == pytest.approx(p[top].tolist(), abs=1e-5)


def test_penalties_and_bias() -> None:
    logits = np.array([2.0, 1.9, -1.0, 0.0], np.float32)

    def pick(*adjustments: tuple[int, float, float]) -> int:
        return _native.sample("", logits, SamplingRow(adjustments=list(adjustments)))[0]

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
            assert -1 <= _native.sample("", logits, row)[0] < 1000
