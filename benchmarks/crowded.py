"""Decoding on one thread and on more where others want the same cores, by turns.

python benchmarks/crowded.py MODEL.gguf [--threads N] [--loops N] [--rounds 15]

Prints tokens per second of both, each a median of turns of a second, and the ratio of all tokens.
`--loops` busy processes run beside them, one for each core if it is not given.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.engine.engine import Engine
from octavo.engine.loader import load_executable
from octavo.engine.open import open_model
from octavo.engine.plan import make_plan
from octavo.engine.request import Request, SamplingParams

CONTEXT = 2048
TURN = 1.0  # seconds


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Keeps so many processes busy."""
    processes = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def make_engine(model: Path, threads: int) -> Engine:
    opened = open_model(model)
    plan = make_plan(opened.compiled, name="m", memory="600MiB", context=CONTEXT, threads=threads)
    executable = load_executable(opened, plan)
    while executable.pack_pending():
        pass
    return Engine(executable, opened.vocabulary, CONTEXT, frozenset())


def take_turn(engine: Engine) -> float:
    """Tokens per second of one sequence, which is followed by another where it ends."""
    began, tokens = time.monotonic(), 0
    while time.monotonic() < began + TURN:
        if not engine.has_work:
            params = SamplingParams(temperature=0, max_tokens=CONTEXT - 8, ignore_eos=True)
            engine.add(Request(id="0", prompt=[5, 6, 7], params=params))
        tokens += len(engine.step())
    return tokens / (time.monotonic() - began)


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--loops", type=int, default=cores)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    one, more = make_engine(args.model, 1), make_engine(args.model, args.threads)
    with busy(args.loops):
        turns = [(take_turn(one), take_turn(more)) for _ in range(args.rounds)]
    alone, together = zip(*turns, strict=True)
    print(f"{args.loops} busy loops on {cores} cores, {args.rounds} turns each, tokens/s:")
    print(f"1 thread {statistics.median(alone):.0f}, {args.threads} threads "
          f"{statistics.median(together):.0f}; over all {sum(together) / sum(alone):.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
