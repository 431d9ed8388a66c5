"""Ratios of this version's speed to another one's: the engine, HTTP, the start, and `--help`.

    python benchmarks/versions.py PYTHON [MODEL] [--cases engine,http,start,help] [--rounds 3]

PYTHON is the interpreter of an environment that has the other version, installed the same way: what an
editable installation adds to the start counts. The two take turns, and who
begins changes each round; a figure is the median of the ratios of each round. Above 1: this one is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from http_clients import over_http
from startup import first_token

STREAMS = (1, 8, 32)
CLIENTS = (1, 32)
HELP = (["--help"], ["serve", "--help"], ["--version"])
Speeds = dict[str, float]  # what was measured -> a figure that is better when larger


def _octavo(python: str, *arguments: str) -> None:
    command = [python, "-m", "octavo.cli.main", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _engine(python: str, model: str) -> Speeds:
    """Tokens per second within the process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        numbers = {"batch": ",".join(map(str, STREAMS)), "prompt": 128, "output": 64, "repeats": 1}
        flags = [str(x) for k, v in numbers.items() for x in (f"--{k}", v)]
        _octavo(python, "bench", "engine", model, *flags, "--json", str(out))
        runs = json.loads(out.read_text())["runs"]
    names = {"prefill": "prefill_tps", "decode": "decode_tps"}
    return {
        f"{n} streams, {what}": run[key]
        for n, run in zip(STREAMS, runs, strict=True)
        for what, key in names.items()
    }


def _http(python: str, model: str) -> Speeds:
    """Tokens per second that streaming clients get."""
    return {f"HTTP, {n} clients": over_http(model, n, 128, 64, python) for n in CLIENTS}


def _start(python: str, model: str) -> Speeds:
    """Starts to the first token a second."""
    return {"first token after a start": 1 / first_token(model, python)}


def _help(python: str, model: str) -> Speeds:
    """Commands a second."""
    speeds = {}
    for arguments in HELP:
        began = time.perf_counter()
        _octavo(python, *arguments)
        speeds["octavo " + " ".join(arguments)] = 1 / (time.perf_counter() - began)
    return speeds


CASES: dict[str, Callable[[str, str], Speeds]] = {
    "engine": _engine,
    "http": _http,
    "start": _start,
    "help": _help,
}


def compare(case: str, other: str, model: str, rounds: int) -> None:
    measure = CASES[case]
    ratios: dict[str, list[float]] = {}
    for turn in range(rounds):
        order = (other, sys.executable) if turn % 2 else (sys.executable, other)
        speeds = {python: measure(python, model) for python in order}
        for name, before in speeds[other].items():
            ratios.setdefault(name, []).append(speeds[sys.executable][name] / before)
    for name, each in ratios.items():
        told = ", ".join(f"{x:.2f}" for x in each)
        print(f"{name:28} {statistics.median(each):.2f}  ({told})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", help="interpreter of the other version's environment")
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    for python in (a.python, sys.executable):
        first_token(a.model, python)  # packs the weights, compiles the modules
    for case in a.cases.split(","):
        compare(case, a.python, a.model, a.rounds)


if __name__ == "__main__":
    main()
