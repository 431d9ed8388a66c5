"""Octavo's side of compare.py."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main(model: str, threads: int, cases: dict[str, list[int]]) -> None:
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
            (run,) = json.loads(out.read_text())["runs"]
            results[name] = {key: run[key] for key in ("prefill_tps", "decode_tps")}
    print(json.dumps(results))


if __name__ == "__main__":
    # This file's name must not hide the package.
    sys.path = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent.resolve()]
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
