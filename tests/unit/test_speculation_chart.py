"""When drafts pay, as a chart, and what llama.cpp says of its own."""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

from octavo.bench.speculation import Saving
from octavo.bench.speculation_chart import DEPTHS, chart, speed_up

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "speculation.py"
TIMES = {rows: 3.0 + rows for rows in range(1, 17)}


@pytest.mark.parametrize("depth, chance", [(1, 0.5), (4, 0.9), (15, 0.2), (8, 1.0), (3, 0.0)])
def test_the_speed_is_that_of_steps_played_out(depth: int, chance: float) -> None:
    """4 standard deviations of the mean of 20,000 steps, each of at most depth + 1 tokens."""
    rng, steps, tokens = random.Random(1), 20_000, 0
    for _ in range(steps):
        tokens += 1
        for _ in range(depth):
            if rng.random() >= chance:
                break
            tokens += 1
    played = tokens / steps * TIMES[1] / TIMES[depth + 1]
    bound = 4 * depth / 2 / steps**0.5
    assert speed_up(TIMES, depth, chance) == pytest.approx(played, abs=bound)


def test_the_chart_has_a_curve_for_each_depth_and_a_dot_for_each_text() -> None:
    savings = [
        Saving("copy", (50.0, 100.0), 1.5, 2.0, 2.0, 0.1, 0.0, 4.0, 100, 80),
        Saving("noise <2>", (50.0, 50.0), 1.0, 1.0, 1.0, 0.1, 0.0, 1.0, 0, 0),
    ]
    svg = ElementTree.fromstring(chart("a & b", TIMES, savings))
    kinds = [element.tag.rpartition("}")[2] for element in svg.iter()]
    assert kinds.count("polyline") == len(DEPTHS) and kinds.count("circle") == 2
    dots = {e[0].text: float(e.attrib["cy"]) for e in svg.iter() if e.tag.endswith("circle")}
    assert dots["copy: 80 of 100, 2.00"] < dots["noise <2>: 0 of 0, 1.00"]  # faster is higher
    words = [e.text for e in svg.iter() if e.tag.endswith("text")]
    assert {"a & b", "noise <2>", "1 token", "15 tokens"} <= set(words)


def test_vllm_is_measured_against_itself() -> None:
    rounds = runpy.run_path(str(SCRIPT))["vllm_round"]
    found = rounds({"vLLM": [4.0, 100, 0, 0], "vLLM n-gram": [2.0, 100, 90, 75]})
    assert found["vLLM"] == (25.0, 1.0, 1.0, 0, 0)
    assert found["vLLM n-gram"] == (50.0, 2.0, 4.0, 90, 75)


def test_what_llama_cpp_prints_is_read() -> None:
    printed = (
        "0.04 I encoded   47 tokens in    1.091 seconds, speed:   43.073 t/s\n"
        "0.04 I decoded   80 tokens in    2.399 seconds, speed:   33.354 t/s\n"
        "0.04 I n_draft   = 3\n0.04 I n_predict = 80\n0.04 I n_drafted = 61\n0.04 I n_accept  = 60\n"
    )
    written = runpy.run_path(str(SCRIPT))["written"]
    assert written(printed) == (2.399, 80, 61, 60)
    with pytest.raises(ValueError):
        written("error: no model")
