"""Octavo's side of compare.py. Settings come as for every command, from OCTAVO_ISA and OCTAVO_ACTIVATIONS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from program import run

# This file's name must not hide the package.
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent.resolve()]


def speeds(model: str, threads: int, cases: dict[str, list[int]]) -> dict[str, dict[str, float]]:
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        for name, (streams, prompt, output) in cases.items():
            options = {
                "batch": streams, "prompt": prompt, "output": output, "threads": threads,
                "repeats": 1, "json": out,
            }  # fmt: skip
            flags = [str(x) for k, v in options.items() for x in (f"--{k}", v)]
            command = [sys.executable, "-m", "octavo.cli.main", "bench", "engine", model, *flags]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            (found,) = json.loads(out.read_text())["runs"]
            results[name] = {key: found[key] for key in ("prefill_tps", "decode_tps")}
    return results


def distributions(model: str, threads: int) -> Callable[[list[int]], np.ndarray]:
    sys.path.append(str(Path(__file__).parents[1]))
    import precision

    from octavo.checkpoint import open_checkpoint

    activations = os.environ.get("OCTAVO_ACTIVATIONS", "auto")
    executable = precision.load(open_checkpoint(Path(model)), activations, "auto", threads)
    return lambda ids: precision.logits(executable, ids)


if __name__ == "__main__":
    run(speeds, distributions)
