"""Recipes of one's own, and what is wrong in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.dequantize import dequantize
from octavo.compress.recipe_file import find_recipe, read_recipe
from octavo.errors import UsageError
from tests.calibration.small import quantized

OWN = """
summary: 4 bits by GPTQ, 8 in the first layer, keys as they are
method: gptq
formats: [gptq, compressed-tensors, mlx]
weights: {bits: 4, group: 64, symmetric: true}
layers:
  - match: "*.k_proj.weight"
    weights: keep
  - match: [model.layers.0.*]
    weights: {bits: 8, group: 32, symmetric: false}
"""


@pytest.mark.parametrize("layout", ["gptq", "compressed-tensors", "mlx"])
def test_own_recipe(layout: str, folder: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(OWN)
    done = quantized(folder, str(tmp_path / "own.yaml"), tmp_path / "out", text, layout)
    assert done.kept == tuple(f"model.layers.{i}.self_attn.k_proj.weight" for i in range(2))
    before, after = open_checkpoint(folder).tensors, open_checkpoint(done.output).tensors
    for name in done.kept:
        assert (dequantize(before[name]) == dequantize(after[name])).all()
    for loss in done.losses:
        wide = ".layers.0." in loss.name
        x, y = dequantize(before[loss.name]), dequantize(after[loss.name])
        assert after[loss.name].group == (32 if wide else 64)
        assert (((x - y) ** 2).mean() < 1e-4 * (x**2).mean()) == wide


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("formats: [gptq]", "line 1: weights is missing"),
        ("formats: [gptq]\nweights: {bits: 5}", "line 2: 5 bits in groups of 64; 2, 3, 4 or 8 bits"),
        ("formats: [gptq]\nweights: {bits: x}", "line 2: 'x' is no whole number"),
        ("formats: [gptq]\nweights: {bits: 4}\nmethode: gptq", "line 3: unknown entry 'methode'"),
        ("formats: [gptq]\nweights: {bits: 4}\nmethod: best", "line 3: 'best' is none of rtn"),
        ("formats: [exl2]\nweights: {bits: 4}", "line 1: 'exl2' is none of gguf, gptq"),
        ("formats: gptq\nweights: {bits: 4}", "line 1: expected a list"),
        ("formats: [gptq]\nweights: {bits: 4}\nlayers:\n  - weights: keep", "line 4: match is missing"),
        ("formats: [gguf]\nweights: Q4_K", "line 1: file_type is missing"),
        ("formats: [gguf]\nfile_type: 15\nweights: Q4", "line 3: 'Q4' is none of"),
        ("formats: [gguf, awq]\nfile_type: 15\nweights: Q4_K", "line 1: gguf has types of its own"),
        ("formats: [gptq]\nweights: fp8", "line 1: fp8 is stored as compressed-tensors"),
        ("formats: [gptq]\nmethod: smoothquant\nweights: {bits: 8}", "line 2: smoothquant takes activations"),
        ("formats: [gptq]\nweights: {bits: 4}\nactivations: dynamic", "line 3: activations take"),
        ("formats: [gptq]\nweights: {bits: 4}\nformats: [awq]", "line 3: formats is there twice"),
        ("formats: [gptq]\nweights: {bits: 4", "line 2: expected ',' or '}'"),
        ("- a", "line 1: expected entries"),
        ("", "line 1: expected entries"),
        ("&a [*a]", "line 1: expected entries"),
        ("formats: " + "[" * 5000, "not YAML"),
    ],
)  # fmt: skip
def test_recipes_say_the_line(wrong: str, says: str) -> None:
    with pytest.raises(UsageError) as e:
        read_recipe(wrong, "own.yaml")
    assert str(e.value).startswith("own.yaml") and says in str(e.value)


def test_find_recipe(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the recipe"):
        find_recipe(str(tmp_path / "none.yaml"))
    with pytest.raises(UsageError, match="no recipe 'q9'; there are q8_0"):
        find_recipe("q9")
