"""Who is served by what: sticky, the same everywhere, and only growing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import UsageError
from octavo.release.assignment import BUCKETS, Allocation, bucket, whole_buckets

NAMES = ("a", "b", "c", "d")
SHARES = st.lists(st.integers(0, 40), min_size=1, max_size=4).map(
    lambda parts: {n: p / max(100, sum(parts)) for n, p in zip(NAMES, parts, strict=False)}
)


@given(st.lists(SHARES, min_size=1, max_size=6))
def test_raising_a_share_moves_nobody_out(changes: list[dict[str, float]]) -> None:
    now, before = Allocation(), {}
    for shares in changes:
        now = now.changed(shares)
        wanted = whole_buckets(shares)
        owners = [now.variant(at) for at in range(0, BUCKETS, 7)]
        for name in NAMES:
            had = {at for at, owner in enumerate(before.get("owners", [])) if owner == name}
            has = {at for at, owner in enumerate(owners) if owner == name}
            if wanted.get(name, 0) >= before.get("wanted", {}).get(name, 0):
                assert had <= has
            else:
                assert has <= had
        assert {n: round(s * BUCKETS) for n, s in now.shares.items()} == {n: w for n, w in wanted.items() if w}  # fmt: skip
        before = {"owners": owners, "wanted": wanted}


def test_another_process_deals_the_same() -> None:
    units = [f"user-{i}" for i in range(200)]
    code = (
        "from octavo.release.assignment import bucket\n"
        "print([bucket('salt', f'user-{i}') for i in range(200)])"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str([bucket("salt", unit) for unit in units])
    assert bucket("salt", "user-0") == 4414  # and so will every later version


def test_units_are_spread_evenly_and_salts_are_unrelated() -> None:
    points = [(bucket("one", str(i)), bucket("two", str(i))) for i in range(20_000)]
    half = BUCKETS // 2
    for quarter in ((a < half, b < half) for a in (0, half) for b in (0, half)):
        count = sum((a < half, b < half) == quarter for a, b in points)
        assert abs(count - 5000) < 5 * (20_000 * 0.25 * 0.75) ** 0.5


def test_shares_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="1.1 together"):
        Allocation.of({"a": 0.6, "b": 0.5})
    with pytest.raises(UsageError, match="0 or more"):
        Allocation.of({"a": -0.1, "b": 0.5})
    thirds = Allocation.of({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}).shares
    assert thirds == {"a": 0.3333, "b": 0.3333, "c": 0.3333}
