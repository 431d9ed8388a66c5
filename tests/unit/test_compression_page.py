"""docs/compression.md: what is said of a table is what the table says."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "compression.md").read_text()
WORDS = " ".join(PAGE.split())
MODELS = ["smollm2", "gemma3-270m"]


def table(model: str) -> dict[str, tuple[float, float]]:
    """Perplexity and the NLL lost by recipe."""
    text = PAGE.partition(f"<!-- compare {model} -->")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    return {r[1]: (float(r[3]), float(r[4].split()[0])) for r in rows if len(r) > 4 and "±" in r[4]}


def said_of(model: str) -> str:
    """What follows a model's table."""
    return WORDS.partition(f"<!-- compare {model} -->")[2].partition("<!-- compare")[0]


def perplexity(model: str) -> float:
    """Of the original, as said above its table."""
    before = WORDS.partition(f"<!-- compare {model} -->")[0]
    return float(re.findall(r"perplexity of the original: ([\d.]+)", before)[-1])


@pytest.mark.parametrize("model", MODELS)
def test_losses_are_from_the_original(model: str) -> None:
    found = {name: made / math.exp(lost) for name, (made, lost) in table(model).items()}
    assert "rtn-4" in found
    assert found == pytest.approx(dict.fromkeys(found, perplexity(model)), abs=0.01)


@pytest.mark.parametrize("model", MODELS)
def test_what_methods_take_away(model: str) -> None:
    """At 4 bits healing loses least, then GPTQ, AWQ and rounding to the nearest."""
    lost = {name: nll for name, (_, nll) in table(model).items()}
    assert 0 < lost["healed-4"] < lost["gptq-4"] < lost["awq-4"] < lost["rtn-4"]
    taken = {
        n: round(100 * (1 - lost[f"{n}-4"] / lost["rtn-4"])) for n in ("gptq", "healed", "awq")
    }
    assert taken["gptq"] >= 30 and taken["healed"] >= 60
    said = f"GPTQ takes away {taken['gptq']} % of what rounding to the nearest loses in 4 bits"
    assert f"{said}, healing {taken['healed']} %, AWQ {taken['awq']} %." in said_of(model)


@pytest.mark.parametrize("model", MODELS)
def test_three_and_eight_bits(model: str) -> None:
    original, found, words = perplexity(model), table(model), said_of(model)
    times = {name: made / original for name, (made, _) in found.items()}
    assert times["rtn-3"] > 3 and times["gptq-3"] < 2
    assert f"GPTQ makes it {times['gptq-3']:.2f} times as high" in words
    grown = {name: 100 * math.expm1(nll) for name, (_, nll) in found.items()}
    assert grown["rtn-8"] <= 0.1 and grown["w8a8"] <= 1
    assert grown["smoothquant"] <= grown["int8-dynamic"]
    said = dict(re.findall(r"`([\w-]+)`(?: costs)? (-?[\d.]+)(?: ± [\d.]+)? %", words))
    # Of figures with four digits.
    for name in ("rtn-8", "smoothquant", "w8a8", "int8-dynamic", "fp8"):
        assert float(said[name]) == pytest.approx(grown[name], abs=0.05)
