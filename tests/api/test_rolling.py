"""Engines are replaced behind a gateway while clients stream; benchmarks/rolling.py does it at length."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_nothing_is_lost_while_every_engine_is_replaced() -> None:
    """Drained before, and by SIGKILL: nothing fails, and every text is right."""
    command = [sys.executable, str(ROOT / "benchmarks" / "rolling.py")]
    command += ["--requests", "200", "--engines", "2", "--ways", "drained", "killed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    rows = {row[0]: row[1:] for row in map(str.split, done.stdout.splitlines()[1:])}
    assert list(rows) == ["drained", "killed", "none"], done.stdout + done.stderr
    assert {way: (row[2], row[3]) for way, row in rows.items()} == dict.fromkeys(rows, ("0", "0"))
    assert sum(int(row[1].replace(",", "")) for row in rows.values()) >= 200
    assert int(rows["killed"][4]) >= 1
    assert done.returncode == 0
