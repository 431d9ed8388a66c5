"""Octavo and llama.cpp on the same file, threads and lengths, in alternating runs.

    python -m venv llamacpp && llamacpp/bin/pip install llama-cpp-python numpy
    python benchmarks/compare_llamacpp.py MODEL.gguf --peer llamacpp/bin/python --json out.json

Every round starts both programs anew, one after the other; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def octavo(model: str, prompt: int, output: int, threads: int, repeats: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [
            sys.executable,
            "-m",
            "octavo.cli.main",
            "bench",
            "engine",
            model,
            "--batch",
            "1",
        ]
        command += ["--prompt", str(prompt), "--output", str(output), "--threads", str(threads)]
        command += ["--repeats", str(repeats), "--json", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (run,) = json.loads(out.read_text())["runs"]
    return {key: run[key] for key in ("prefill_tps", "decode_tps")}


def llamacpp(python: str, model: str, *numbers: int) -> dict[str, float]:
    script = Path(__file__).with_name("peer_llamacpp.py")
    command = [python, str(script), model, *map(str, numbers)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(result.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--peer", required=True, help="python with llama-cpp-python")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    numbers = (a.prompt, a.output, a.threads, a.repeats)
    rounds = []
    for _ in range(a.rounds):
        pair = {
            "octavo": octavo(a.model, *numbers),
            "llama.cpp": llamacpp(a.peer, a.model, *numbers),
        }
        rounds.append(pair)
        print(json.dumps(pair), flush=True)
    summary = {}
    for key in ("prefill_tps", "decode_tps"):
        ours, theirs = (
            statistics.median(r[who][key] for r in rounds) for who in ("octavo", "llama.cpp")
        )
        summary[key] = {
            "octavo": round(ours, 1),
            "llama.cpp": round(theirs, 1),
            "ratio": round(ours / theirs, 2),
        }
    print(json.dumps(summary, indent=1))
    if a.json:
        record = {
            "model": Path(a.model).name,
            "arguments": numbers,
            "rounds": rounds,
            "summary": summary,
        }
        a.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
