"""The table that benchmarks/compare.py makes, and where it puts it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare.py"


@pytest.fixture(scope="module")
def compare():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("compare", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ratios_are_those_of_the_medians_and_of_the_best_peer(compare) -> None:  # type: ignore[no-untyped-def]
    def result(speed: float) -> dict[str, dict[str, float]]:
        return {case: {"prefill_tps": speed, "decode_tps": 2 * speed} for case in compare.CASES}

    speeds = [
        {"octavo": 50, "a": 5, "b": 10},
        {"octavo": 40, "a": 20, "b": 10},
        {"octavo": 10, "a": 5, "b": 30},
    ]
    rounds = [{who: result(speed) for who, speed in each.items()} for each in speeds]
    lines = compare.table(compare.summarize(rounds)).splitlines()
    assert lines[0] == "| tokens/s | octavo | a | b | octavo / best peer |"
    assert lines[2] == "| 1 stream, prefill | 40 | 5 | 10 | 4.00 |"
    assert lines[3] == "| 1 stream, decode | 80 | 10 | 20 | 4.00 |"


def test_a_page_gets_the_table_of_its_model_only(compare, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- compare m.gguf -->\nold\n<!-- end -->\nb\n<!-- compare n.gguf -->\nkept\n<!-- end -->\n"
    )
    for _ in range(2):
        compare.update(page, "m.gguf", "| new |")
    assert page.read_text() == (
        "a\n<!-- compare m.gguf -->\n\n| new |\n\n<!-- end -->\nb\n<!-- compare n.gguf -->\nkept\n<!-- end -->\n"
    )
    with pytest.raises(ValueError, match=r"no <!-- compare o\.gguf -->"):
        compare.update(page, "o.gguf", "| new |")


def test_the_pages_of_the_project_have_their_places(compare, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for name in ("README.md", "docs/benchmarks.md"):
        copy = tmp_path / Path(name).name
        copy.write_text((SCRIPT.parents[1] / name).read_text())
        compare.update(copy, "SmolLM2-135M-Instruct.Q4_1.gguf", "| new |")
        assert "| new |" in copy.read_text()
