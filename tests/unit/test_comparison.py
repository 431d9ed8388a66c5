"""docs/comparison.md and the table of the README: every yes of ours is backed by tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ("Octavo", "Ollama", "llama.cpp", "vLLM", "OpenVINO")
TEST = re.compile(r"`(\w+/test_\w+\.py)::(test_\w+)`")


def table(page: str) -> dict[str, list[str]]:
    """The rows of all tables that compare, by what they are about."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]  # fmt: skip
    width = {len(row) for row in rows if tuple(row[1:6]) == NAMES}
    return {r[0]: r[1:] for r in rows if len(r) in width and r[0] and set(r[0]) != {"-"}}


COMPARISON = table((ROOT / "docs" / "comparison.md").read_text())


def test_every_yes_has_tests_that_exist() -> None:
    assert len(COMPARISON) > 40
    for what, (ours, *others, tests) in COMPARISON.items():
        assert ours in ("yes", "no") and all(others), what
        named = TEST.findall(tests)
        assert bool(named) == (ours == "yes"), what
        assert ", ".join(f"`{file}::{name}`" for file, name in named) == tests
        for file, name in named:
            tree = ast.parse((ROOT / "tests" / file).read_text())
            assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, (file, name)  # fmt: skip


def test_the_readme_says_the_same() -> None:
    short = table((ROOT / "README.md").read_text())
    assert len(short) > 10
    plain = {
        what: [re.sub(r" \[\d+\]", "", cell) for cell in cells[:5]]
        for what, cells in COMPARISON.items()
    }
    assert {what: plain.get(what) for what in short} == short
