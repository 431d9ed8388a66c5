"""What profiling takes of an engine's speed while it lasts.

python benchmarks/profiling.py [MODEL] [--rounds 30] [--tokens 64] [--threads N]

Equal requests with and without a profile take turns, on one engine, so that what else the machine
does is felt by both.
"""

from __future__ import annotations

import argparse
import statistics
import time

from octavo.backends.base import TRACED
from octavo.checkpoint.hub import locate
from octavo.engine.constraint import TokenTable
from octavo.engine.engine import Engine
from octavo.engine.loader import load_executable, make_engine
from octavo.engine.open import open_model
from octavo.engine.plan import make_plan
from octavo.engine.profiler import EngineProfiler
from octavo.engine.request import Request, SamplingParams


def seconds(engine: Engine, name: str, tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    engine.add(Request(id=name, prompt=list(range(100, 116)), params=params))
    began = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    located = locate(args.model)
    opened = open_model(located.path)
    plan = make_plan(
        opened.compiled, name=located.name, threads=args.threads, speculation="off"
    )  # fmt: skip
    executable = load_executable(opened, plan)
    engine = make_engine(opened, executable, plan, TokenTable([], [], []))
    while engine.pack_pending():
        pass
    seconds(engine, "warm", args.tokens)
    plain, profiled, ratios = [], [], []
    for i in range(args.rounds):
        plain.append(seconds(engine, f"plain{i}", args.tokens))
        profiler = EngineProfiler(engine, executable, plan, [])
        profiled.append(seconds(engine, f"profiled{i}", args.tokens))
        spans = sum(map(len, profiler.stop().kernels.threads)) // TRACED.itemsize
        ratios.append(profiled[-1] / plain[-1])
    for name, times in (("without", plain), ("with", profiled)):
        print(f"{name}: {args.tokens / statistics.median(times):.1f} tokens/s, median of {args.rounds}")  # fmt: skip
    print(f"with a profile, a request takes {100 * (statistics.median(ratios) - 1):+.2f} %, the median of pairs; {spans} spans of kernels each")  # fmt: skip


if __name__ == "__main__":
    main()
