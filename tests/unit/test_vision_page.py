"""docs/vision.md against the tests: every hostile case has a row, every test it names exists."""

from __future__ import annotations

import re
from pathlib import Path

from tests.api.hostile_media import CASES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vision.md").read_text()


def test_every_hostile_case_has_a_row() -> None:
    named = re.findall(r"\| `test_answer\[(.+?)\]` \|$", PAGE, re.MULTILINE)
    assert sorted(named) == sorted(case.id for case in CASES)


def test_every_test_exists() -> None:
    files = set(re.findall(r"`(tests/\S+\.py)`", PAGE))
    assert len(files) > 5 and all((ROOT / file).is_file() for file in files)
    source = (ROOT / "tests/api/test_hostile_media.py").read_text()
    rows = set(re.findall(r"\| `(test_\w+)(?:\[.+?\])?` \|$", PAGE, re.MULTILINE))
    assert len(rows) == 3 and rows <= set(re.findall(r"^def (test_\w+)", source, re.MULTILINE))
