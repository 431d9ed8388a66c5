"""How often releases are rolled back that should not be, and how soon those that should.

    python benchmarks/releases.py            # 1,000 runs of each, a minute or two
    python benchmarks/releases.py --runs 100

Traffic is made up: Poisson arrivals, TTFT and inter-token latency log-normal (a standard deviation
of 60 % and 30 %), which rise and fall by 30 % over twenty minutes for both versions alike. All of it
goes through the same events, sums and steps as in a gateway; time is simulated.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from dataclasses import dataclass
from multiprocessing import Pool

import numpy as np

from octavo.release import machine
from octavo.release.events import RequestEvent
from octavo.release.spec import Guard, ReleaseSpec
from octavo.release.tally import CANARY, Rows, Tally

SPEC = ReleaseSpec(
    model="model", stable="old", canary="new",
    guards=(
        Guard(metric="error_rate", max=0.01, alpha=0.005),
        Guard(metric="ttft_over", slo_ms=800, max=0.05),
        Guard(metric="itl_mean", worse_than_baseline=0.1),
        Guard(metric="empty_rate", max=0.02),
        Guard(metric="repeat_rate", max=0.05),
    ),
).check()  # fmt: skip


@dataclass(frozen=True)
class Version:
    """How a version behaves. from_then: seconds after which it does; before, it is sound."""

    errors: float = 0.002
    slower: float = 1.0
    empty: float = 0.003
    repeats: float = 0.005
    from_then: float = 0.0


@dataclass(frozen=True)
class Run:
    phase: str
    seconds: float
    reason: str


def event(v: Version, old: Version, arm: str, step: int, at: float, draw: np.ndarray) -> RequestEvent:  # fmt: skip
    """draw: two normal numbers and three uniform ones."""
    v = v if at >= v.from_then else old
    load = (1 + 0.3 * math.sin(at / 1200 * 2 * math.pi)) * v.slower
    return RequestEvent(
        arm, at, step, failed=draw[2] < v.errors, ttft=0.2 * load * math.exp(0.6 * draw[0]),
        itl=0.03 * load * math.exp(0.3 * draw[1]), tokens=100, empty=draw[3] < v.empty,
        repeating=draw[4] < v.repeats,
    )  # fmt: skip


def run(spec: ReleaseSpec, new: Version, rate: float, seed: int, old: Version = Version(), longest: float = 40_000) -> Run:  # fmt: skip
    """A release at so many requests a second, which is looked at after every bad answer of the canary
    and every tenth good one."""
    rng, tally = np.random.default_rng(seed), Tally(spec)
    rows: Rows = {}
    state, at, served = machine.start(0.0), 0.0, 0
    while at < longest and state.phase == "running":
        n = 1024
        times = at + rng.exponential(1 / rate, n).cumsum()
        draws = np.column_stack((rng.standard_normal((n, 2)), rng.random((n, 4))))
        for at, draw in zip(times.tolist(), draws, strict=True):
            arm = machine.arm(spec, state, draw[5])
            version = new if arm == CANARY else old
            e = event(version, old, arm, state.step, at, draw)
            tally.observe(rows, e, state.began)
            if arm == CANARY:
                served += 1
                if e.failed or e.empty or e.repeating or e.ttft > 0.8 or served % 10 == 0:
                    state = machine.advance(spec, state, tally.read(rows), at)
                if state.phase != "running":
                    break
    return Run(state.phase, at, state.reason)


@dataclass(frozen=True)
class Case:
    """What is simulated. rate: of all requests a second; the first step gives the canary 5 %."""

    name: str
    new: Version
    rate: float


SOUND = (
    Case("healthy, 0.2 % errors, 1 request/s", Version(), 1.0),
    Case("healthy, 0.8 % errors, 1 request/s", Version(errors=0.008), 1.0),
)
BROKEN = (
    Case("30 % errors, canary 1 request/s", Version(errors=0.3), 20.0),
    Case("10 % errors, canary 1 request/s", Version(errors=0.1), 20.0),
    Case("5 % errors, canary 1 request/s", Version(errors=0.05), 20.0),
    Case("30 % errors after 4 min, 1 request/s", Version(errors=0.3, from_then=240), 20.0),
    Case("20 % slower, canary 1 request/s", Version(slower=1.2), 20.0),
    Case("20 % slower, all 1 request/s", Version(slower=1.2), 1.0),
    Case("10 % empty, canary 1 request/s", Version(empty=0.1), 20.0),
    Case("20 % repeating, canary 1 request/s", Version(repeats=0.2), 20.0),
)


def one(task: tuple[Case, int]) -> Run:
    case, seed = task
    old = Version(errors=min(case.new.errors, 0.008)) if case in SOUND else Version()
    return run(SPEC, case.new, case.rate, seed, old)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000, help="of each sound case")
    parser.add_argument("--broken", type=int, default=200, help="runs of each broken case")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    with Pool(given.processes) as pool:
        print("| sound | rolled back | promoted | paused | hours, median |\n|---|---|---|---|---|")
        for case in SOUND:
            runs = pool.map(one, [(case, seed) for seed in range(given.runs)], chunksize=4)
            count = Counter(r.phase for r in runs)
            hours = statistics.median(r.seconds for r in runs) / 3600
            print(
                f"| {case.name} | {count['rolled_back'] / len(runs):.1%} | {count['promoted']} of {len(runs)} | {count['paused']} | {hours:.1f} |",
                flush=True,
            )
        print("\n| broken | found | s, median | s, mean | s, 90 % |\n|---|---|---|---|---|")
        for case in BROKEN:
            runs = pool.map(one, [(case, seed) for seed in range(given.broken)], chunksize=4)
            late = [r.seconds - case.new.from_then for r in runs if r.phase == "rolled_back"]
            after = [*late, *[math.inf] * (len(runs) - len(late))]
            print(
                f"| {case.name} | {len(late) / len(runs):.1%} | {statistics.median(after):.0f} | {statistics.mean(late):.1f} | {sorted(after)[int(0.9 * len(after))]:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
