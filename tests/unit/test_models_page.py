"""docs/models.md against the code: every architecture has a row, every test it names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from octavo.models import ARCHITECTURES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()


def test_every_architecture_has_a_row() -> None:
    rows = PAGE.split("## Families")[1].split("\n## ")[0].splitlines()
    listed = {
        name
        for row in rows
        if row.startswith("| ")
        for name in re.findall(r"`([\w-]+)`", row.split("|")[2])
    }
    assert listed == set(ARCHITECTURES)


def test_every_test_exists() -> None:
    named = set(re.findall(r"`(test_\w+\.py::[^`]+)`", PAGE))
    assert len(named) > 60
    folders = ["tests/parity", "tests/unit", "tests/engine"]
    command = [sys.executable, "-m", "pytest", "--collect-only", *folders]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    ids = {line.rsplit("/", 1)[-1] for line in found.splitlines() if "::" in line}
    known = ids | {i.split("[")[0] for i in ids}
    assert named <= known, sorted(named - known)


def test_families_are_small() -> None:
    for path in (ROOT / "src" / "octavo" / "models").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 200, path.name
