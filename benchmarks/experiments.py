"""How often experiments find a difference that there is not, and how much narrower CUPED makes them.

    python benchmarks/experiments.py            # 1,000 experiments

Units are users with one request each. TTFT is made as an engine makes it: a queue (exponential,
80 ms) and the prefill of the prompt's tokens that are not cached, at 2,000 a second. Prompts are
log-normal (median 500 tokens, the middle two thirds between 170 and 1,500), as chats are; 40 % of
the requests find the first half of their prompt cached. The covariate is known before assignment.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from octavo.experiments.analysis import LEAST, half_width, linear, multinomial_evidence
from octavo.experiments.totals import Units
from octavo.release.moments import difference

ALPHA, HORIZON = 0.05, 5000


def traffic(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """TTFT in seconds, and the prompt's tokens that are not cached."""
    prompt = np.minimum(rng.lognormal(math.log(500), 1.1, shape), 16_000)
    uncached = np.where(rng.random(shape) < 0.4, prompt / 2, prompt)
    return rng.exponential(0.08, shape) + uncached / 2000, prompt


def sums(values: np.ndarray, part: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Number, mean and its variance of a part of the values, after each of them."""
    n = part.cumsum(axis=1).clip(1)
    mean = (values * part).cumsum(axis=1) / n
    spread = (values**2 * part).cumsum(axis=1) - n * mean**2
    return n, mean, spread / (n - 1).clip(1) / n


def peeked(rng: np.random.Generator, runs: int, units: int) -> tuple[float, float]:
    """The part of A/A experiments that, looked at after every unit, ever find a difference: by
    these intervals, and by those that hold for one look (1.96 standard errors)."""
    ours = fixed = 0
    for start in range(0, runs, 50):
        shape = min(50, runs - start), units
        values, _ = traffic(rng, shape)
        one = rng.random(shape) < 0.5

        (n, mean, variance), (m, other, rest) = sums(values, one), sums(values, ~one)
        gap, total = np.abs(mean - other), variance + rest
        enough = (n >= LEAST) & (m >= LEAST)
        ours += int(((gap > half_width(total, n + m, HORIZON, ALPHA)) & enough).any(axis=1).sum())
        fixed += int(((gap > 1.96 * np.sqrt(total)) & enough).any(axis=1).sum())
    return ours / runs, fixed / runs


def mismatched(rng: np.random.Generator, runs: int, units: int, share: float) -> float:
    """The part of experiments of two halves that are called unsound if one has such a share."""
    found = 0
    for _ in range(runs):
        one = (rng.random(units) < share).cumsum()
        looks = range(10, units, 10)
        found += any(
            multinomial_evidence([one[n], n + 1 - one[n]], [0.5, 0.5]) > math.log(1000)
            for n in looks
        )
    return found / runs


def narrower(rng: np.random.Generator, units: int) -> float:
    """How much narrower CUPED makes an interval."""
    groups = []
    for _ in range(2):
        values, prompt = traffic(rng, (units // 2,))
        ones = np.ones(units // 2)
        groups.append(Units(ones, values, prompt[:, None], ones))
    adjusted = difference(linear(groups[0])[1], linear(groups[1])[1])
    return 1 - math.sqrt(1 - adjusted.explained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--units", type=int, default=5000)
    given = parser.parse_args()
    rng = np.random.default_rng(1)
    ours, fixed = peeked(rng, given.runs, given.units)
    print(
        f"A/A, {given.runs} runs of {given.units} units, looked at after every one, alpha {ALPHA:g}:"
    )
    print(f"  found a difference: {ours:.1%}; with 1.96 standard errors: {fixed:.1%}")
    for share in (0.5, 0.45):
        part = mismatched(rng, max(10, given.runs // 5), given.units, share)
        print(f"sample-ratio mismatch found where one of two halves has {share:.0%}: {part:.1%}")
    widths = sorted(narrower(rng, given.units) for _ in range(100))
    print(
        f"CUPED by prompt tokens: intervals narrower by {widths[50]:.1%} (median of 100; {widths[0]:.1%} to {widths[-1]:.1%})"
    )


if __name__ == "__main__":
    main()
