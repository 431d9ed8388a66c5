"""Layers of zeros, weights that are no numbers and too little text: a result, or an error that says it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.dequantize import dequantize
from octavo.errors import UsageError
from tests.calibration.small import quantized, save_changed

DIFFERENT = ("healed-4", "awq-4", "w8a8")  # in how they look at layers
ODD = "model.layers.1.mlp.up_proj.weight"


def test_a_layer_of_zeros_and_one_that_sees_nothing(gguf: Path, text: Path, tmp_path: Path) -> None:
    """Zeros stay zeros; behind an input of zeros, H is singular, layers are rounded to the nearest."""
    dead = ("model.layers.0.self_attn.v_proj.weight", "model.layers.1.input_layernorm.weight")
    source = save_changed(gguf, tmp_path / "dead", lambda n, x: x * (n not in dead))
    for recipe in DIFFERENT:
        done = quantized(source, recipe, tmp_path / recipe, text)
        made = open_checkpoint(done.output).tensors
        assert not dequantize(made[dead[0]]).any()
        for name in ("q_proj", "v_proj"):
            x, y = (
                dequantize(c[f"model.layers.1.self_attn.{name}.weight"])
                for c in (open_checkpoint(source).tensors, made)
            )
            assert ((x - y) ** 2).mean() < 0.012 * (x**2).mean()


def test_weights_that_are_no_numbers(gguf: Path, text: Path, tmp_path: Path) -> None:
    def spoilt(name: str, x: np.ndarray) -> np.ndarray:
        if name == ODD:
            x[3, 5] = np.nan
        return x

    source = save_changed(gguf, tmp_path / "bad", spoilt)
    for recipe in DIFFERENT:
        with pytest.raises(UsageError, match=f"{ODD}: 1 of the weights are not finite"):
            quantized(source, recipe, tmp_path / "out", text)
        assert [p.name for p in tmp_path.iterdir()] == ["bad"]


def test_too_little_text(folder: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    for words in ("a", "a b c d e f " * 20):
        short.write_text(words)
        with pytest.raises(UsageError, match="tokens|too few"):
            quantized(folder, "gptq-4", tmp_path / "out", short)
        assert [p.name for p in tmp_path.iterdir()] == ["short.txt"]
